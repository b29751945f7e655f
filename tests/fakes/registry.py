"""An in-memory tool registry with a journal and configurable tools, which counts effects."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import OutputChecked
from pawl.agent_loop.loop.rules.parts import FilePart
from pawl.agent_loop.loop.rules.run import PinnedTool, Run
from pawl.agent_loop.loop.rules.tool import (
    ExecutionPiece,
    ExecutionResult,
    ProposedCall,
    RecordedDecision,
    RecordedResult,
    Resolved,
    Stopped,
    Tool,
    Verdict,
)
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, StoreId
from pawl.chassis.process.tasks import shield
from pawl.errors import (
    DependencyUnavailable,
    DocumentNotFound,
    InvalidArguments,
    InvalidSchema,
    PawlError,
    ToolExists,
    ToolNotFound,
)
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.workflow_pb2 import WorkflowVersion
from pawl.job.v1.ledger_pb2 import GetRunResponse
from pawl.tool.v1 import tool_pb2
from pawl.values import (
    REPEATABLE,
    Disposition,
    EffectClass,
    Execution,
    ExecutionContext,
    JobReports,
    Outcome,
    Progress,
    ReadTimeouts,
    ReportPolicy,
    Series,
)

CANCELLED = ExecutionResult(
    outcome=Outcome.CANCELLED,
    result=CallResult(content_json=b'{"error":"cancelled"}', is_error=True, error_reason="CANCELLED"),
)

NOT_COMPLETED = CallResult(content_json=b'{"error":"nobody"}', is_error=True, error_reason="NOT_COMPLETED")


@dataclass
class FakeRegistry:
    """A registry with a verdict per tool.

    Executions take `seconds`, return `results`, and fail according to `failing`.
    """

    verdicts: dict[str, Verdict]
    seconds: float = 1.0
    results: dict[str, CallResult] = field(default_factory=dict)
    effects: Counter[str] = field(default_factory=Counter)
    order: list[str] = field(default_factory=list)
    # Progress that each execution reports, and the pause before each report
    progress: Sequence[tuple[float, Progress]] = ()
    # Whether read-only calls run with their check if requested
    reads_at_once: bool = False
    # Tools whose calls have an unknown outcome
    forgets: set[str] = field(default_factory=set)
    # Tools completed from outside, and how long each call waits for that after it has run
    awaited: dict[str, float] = field(default_factory=dict)
    # External completions of calls, by call id
    completed: dict[str, CallResult] = field(default_factory=dict)
    running: int = 0
    running_max: int = 0
    # How many of the next requests fail with `error`
    unreachable: int = 0
    error: type[PawlError] = DependencyUnavailable
    cancelled: list[str] = field(default_factory=list)
    asked: list[Execution] = field(default_factory=list)
    # The contexts of `asked`
    contexts: list[CallContext] = field(default_factory=list)
    checked: list[ProposedCall] = field(default_factory=list)
    # The verdict on calls of tools that came with their run
    own_verdict: Verdict = field(default_factory=lambda: tool("OFFER", context="FRONTEND"))
    decisions: list[RecordedDecision] = field(default_factory=list)
    returned: list[RecordedResult] = field(default_factory=list)
    outputs: list[str | None] = field(default_factory=list)
    # How many of the next answers cannot be checked immediately
    unchecked_outputs: int = 0
    _awaited_until: dict[str, float] = field(default_factory=dict)
    _journal: dict[str, asyncio.Task[ExecutionResult]] = field(default_factory=dict)

    async def resolve(
        self,
        context: CallContext,
        names: Sequence[str],
        pinned: Sequence[PinnedTool] = (),
        *,
        most: int = 0,
        skip_missing: bool = False,
    ) -> Resolved:
        self._answer()
        if skip_missing and names:
            known = [name for name in names if name in self.verdicts]
            return Resolved(tools=tuple(self._tool(name) for name in known))
        for name in names:
            if name not in self.verdicts:
                raise ToolNotFound(tool_name=name)
        tools = tuple(map(self._tool, names or self.verdicts))
        taken = tools[:most] if most else tools
        return Resolved(tools=taken, left_out=len(tools) - len(taken))

    def _tool(self, name: str) -> Tool:
        return Tool(name=name, version=1, context=self.verdicts[name].context)

    async def check(
        self,
        context: CallContext,
        calls: Sequence[ProposedCall],
        known_tool_names: Sequence[str],
        reads: ReadTimeouts | None = None,
    ) -> tuple[Verdict, ...]:
        self._answer()
        self.checked += calls
        verdicts = [
            replace(self._verdict(call), call_id=call.call_id, arguments_json=call.arguments_json, tool_version=1)
            for call in calls
        ]
        if context.in_background:
            verdicts = [replace(verdict, timeout_seconds=verdict.async_timeout_seconds) for verdict in verdicts]
        may_read = reads is not None and self.reads_at_once
        if may_read and all(verdict.effect_class is EffectClass.READ_ONLY for verdict in verdicts):
            ended = await asyncio.gather(*(self._perform(call.call_id, call.tool_name) for call in calls))
            verdicts = [replace(verdict, result=end) for verdict, end in zip(verdicts, ended, strict=True)]
        return tuple(verdicts)

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: str | None) -> OutputChecked:
        """Accept a JSON object that has at least as many members as `minProperties` in the schema."""
        self.outputs.append(output)
        if self.unchecked_outputs:
            self.unchecked_outputs -= 1
            raise DependencyUnavailable("away")
        try:
            value = json.loads(output or "")
        except ValueError:
            return OutputChecked(faults=("the answer is not JSON",))
        least = json.loads(schema_json).get("minProperties", 0)
        if not isinstance(value, dict) or len(value) < least:
            return OutputChecked(faults=(f"the answer has fewer than {least} members",))
        return OutputChecked(output_json=json.dumps(value).encode())

    def _verdict(self, call: ProposedCall) -> Verdict:
        return self.verdicts[call.tool_name] if call.own_tool is None else self.own_verdict

    async def record_decisions(self, context: CallContext, decisions: Sequence[RecordedDecision]) -> None:
        self._answer()
        self.decisions += decisions

    async def record_results(self, context: CallContext, results: Sequence[RecordedResult]) -> None:
        self._answer()
        self.returned += results

    async def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        self._answer()
        self.asked.append(execution)
        self.contexts.append(context)
        name, call_id = execution.tool_name, execution.call_id
        for pause, progress in self.progress:
            await asyncio.sleep(pause)
            yield progress
        if self.verdicts[name].effect_class in REPEATABLE:
            yield await self._perform(call_id, name)
            return
        task = self._journal.get(call_id)
        if task is None:
            task = self._journal[call_id] = asyncio.get_running_loop().create_task(self._perform(call_id, name))
        ended = await shield(task)
        yield self._awaited(call_id, name, ended) if name in self.awaited else ended

    def _awaited(self, call_id: str, name: str, ended: ExecutionResult) -> ExecutionResult:
        if ended.outcome is not Outcome.SUCCEEDED:
            return ended
        now = asyncio.get_running_loop().time()
        left = self._awaited_until.setdefault(call_id, now + self.awaited[name]) - now
        if call_id in self.completed:
            return replace(ended, result=self.completed[call_id])
        if left <= 0:
            return ExecutionResult(outcome=Outcome.FAILED, result=NOT_COMPLETED)
        return replace(ended, outcome=Outcome.AWAITING_COMPLETION, completion_seconds_left=left)

    async def cancel(self, context: CallContext, call_id: str, *, wait_seconds: float) -> Stopped:
        self._answer()
        self.cancelled.append(call_id)
        task = self._journal.get(call_id)
        if task is None:
            # From now on the call cannot start.
            self._journal[call_id] = asyncio.get_running_loop().create_task(_value(CANCELLED))
            return Stopped(stopped=True)
        if call_id in self._awaited_until and call_id not in self.completed:
            self._journal[call_id] = asyncio.get_running_loop().create_task(_value(CANCELLED))
            return Stopped(stopped=True, result=CANCELLED)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            return Stopped(stopped=True, result=CANCELLED)
        return Stopped(stopped=True, result=CANCELLED if task.cancelled() else task.result())

    async def _perform(self, call_id: str, name: str) -> ExecutionResult:
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        self.order.append(call_id)
        try:
            await asyncio.sleep(self.seconds)
            self.effects[call_id] += 1
        finally:
            self.running -= 1
        if name in self.forgets:
            return ExecutionResult(outcome=Outcome.UNKNOWN, result=CallResult(content_json=b"null"))
        result = self.results.get(name, CallResult(content_json=f'"{name} done"'.encode()))
        return ExecutionResult(outcome=Outcome.FAILED if result.is_error else Outcome.SUCCEEDED, result=result)

    def _answer(self) -> None:
        if self.unreachable > 0:
            self.unreachable -= 1
            raise self.error


async def _value(result: ExecutionResult) -> ExecutionResult:
    return result


def tool(disposition: str = "RUN", context: str = "BACKEND", effect: str = "AT_MOST_ONCE", **fields: object) -> Verdict:
    return Verdict(
        call_id=CallId(""),
        disposition=Disposition(disposition),
        context=ExecutionContext(context),
        effect_class=EffectClass(effect),
        **fields,  # type: ignore[arg-type]
    )


def own_tool(name: str, fallback: str = "", description: str = "Do it.") -> Tool:
    definition = tool_pb2.ToolDefinition(name=name, description=description, fallback_tool_name=fallback)
    digest = hashlib.sha256(definition.SerializeToString()).hexdigest()
    return wire.OWN_TOOL.read(tool_pb2.OwnTool(definition=definition, definition_sha256=digest))


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
        self.workflows: dict[str, str] = {}

    async def put_workflow_tool(self, store_id: StoreId, workflow: WorkflowVersion, *, validate_only: bool) -> None:
        if workflow.as_tool and workflow.name in self.taken:
            raise ToolExists(f"{workflow.name!r} is a tool")
        if not validate_only:
            self.workflows.pop(workflow.name, None)
            self.workflows |= {workflow.name: workflow.description} if workflow.as_tool else {}

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
        return OutputChecked(faults=("ticket: not a ticket",) if output is not None and "misfit" in output else ())

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
