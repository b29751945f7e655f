from __future__ import annotations

from collections.abc import Sequence

from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.parts import FilePart
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId
from pawl.errors import DependencyUnavailable, DocumentNotFound, InvalidArguments, InvalidSchema, ToolExists
from pawl.event.v1.call_pb2 import Call
from pawl.job.v1.ledger_pb2 import GetRunResponse
from pawl.tool.v1 import tool_pb2
from pawl.values import Disposition, ExecutionContext, JobReports, ReportPolicy, Series

_DIGEST = ReportPolicy(reports=JobReports.DIGEST, report_seconds=600.0)


class FakeChecker(RegistryClient):
    """Rejects arguments and answers that contain `bad`.

    It knows seven tools and offers five, one only to the role clerk.
    """

    is_away = False

    def __init__(self) -> None:
        self.documents = {"handbook.md": "Water the plants."}
        self.taken = frozenset({"look"})
        self.gone = {"missing"}
        self.jobs_of: list[tuple[str, str]] = []

    async def check_answer(self, store_id: str, answer_schema_json: bytes, answer: str) -> None:
        if "bad" in answer:
            raise InvalidArguments("the answer does not fit: it must be a number")

    async def read_document(self, caller: Principal, file: FilePart) -> str:
        if file.document_name not in self.documents:
            raise DocumentNotFound
        return self.documents[file.document_name]

    async def check_output(self, store_id: str, schema_json: bytes, output: str | None) -> OutputChecked:
        if b"bad" in schema_json:
            raise InvalidSchema("the schema is not valid")
        return OutputChecked()

    async def check_edit(
        self, read: GetRunResponse, call: Call, arguments_json: bytes, series: Series | None = None
    ) -> Verdict:
        if b"bad" in arguments_json:
            raise InvalidArguments("to: not an address; subject: missing")
        return Verdict(
            call_id=CallId(call.call_id),
            disposition=Disposition.APPROVE,
            arguments_json=arguments_json.replace(b" ", b""),
            digest="ef" * 32,
            series_digest="cd" * 32,
        )

    async def check_job(self, caller: Principal, run: Run, now: float) -> Verdict:
        assert run.job is not None
        self.jobs_of.append((run.reports_to_conversation_id, run.run_id))
        name, data = run.job.tool_name, run.job.arguments_json
        refused = {
            "denied": ("NOT_ALLOWED", "a rule"),
            **dict.fromkeys(self.gone, ("TOOL_NOT_FOUND", "there is no tool")),
        }
        reason, message = refused.get(name, ("INVALID_ARGUMENTS", "to: missing") if b"bad" in data else ("", ""))
        return Verdict(
            call_id=CallId("call"),
            disposition=Disposition.REFUSE if reason else Disposition.RUN,
            error_reason=reason,
            error_message=message,
            context=ExecutionContext.FRONTEND if name == "show" else ExecutionContext.BACKEND,
            arguments_json=data.replace(b" ", b""),
            without_background=name == "here",
            async_timeout_seconds=7200.0,
            reports=_DIGEST if name == "digest" else None,
        )

    async def count_tools(self, caller: Principal) -> int:
        if self.is_away:
            raise DependencyUnavailable
        return 7

    async def check_own(self, caller: Principal, definitions: Sequence[bytes]) -> tuple[Tool, ...]:
        """Return the run's own tools, or reject the name of an existing tool."""
        named = [tool_pb2.ToolDefinition.FromString(each) for each in definitions]
        for definition in named:
            if definition.name in self.taken:
                raise ToolExists(f"there is a tool {definition.name!r} already")
        tools = (tool_pb2.OwnTool(definition=each, definition_sha256=f"{each.name:_<64}") for each in named)
        return tuple(map(wire.OWN_TOOL.read, tools))

    async def offered(self, caller: Principal) -> tuple[OfferedTool, ...]:
        found = [("look", "builtin"), ("mail", "builtin"), ("run_agent", "builtin"), ("shop.order", "http:shop")]
        found += [("pay", "module:pay")] if "clerk" in caller.roles else []
        return tuple(OfferedTool(name=name, source=source) for name, source in found)
