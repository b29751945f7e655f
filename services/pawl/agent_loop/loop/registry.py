from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import grpc
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules import hints, jobs, proposals
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
from pawl.chassis.rpc.client import translated, translating
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import InvalidArguments
from pawl.event.v1 import call_pb2
from pawl.event.v1.workflow_pb2 import WorkflowVersion
from pawl.job.v1.ledger_pb2 import GetRunResponse
from pawl.tool.v1 import execution_pb2, execution_pb2_grpc, tool_pb2
from pawl.values import Disposition, Execution, ExecutionContext, Progress, ReadTimeouts, Series

# Extra time for the response to a cancel request, in addition to its own wait.
_CANCEL_MARGIN_SECONDS: Final = 5.0

_CONTEXTS: Final = wire.WIRE.enum(ExecutionContext, call_pb2.ExecutionContext)

_CONTEXT: Final = wire.WIRE.struct(CallContext, execution_pb2.CallContext)
_PROPOSED: Final = wire.WIRE.struct(
    ProposedCall,
    execution_pb2.ProposedCall,
    Exceptions(
        of_struct=("own_tool",),
        write={"own_tool": lambda call: None if call.own_tool is None else wire.OWN_TOOL.write(call.own_tool)},
    ),
)
_DECISION: Final = wire.WIRE.struct(RecordedDecision, execution_pb2.RecordedDecision)
_RESULT_NOTE: Final = wire.WIRE.struct(
    RecordedResult,
    execution_pb2.RecordedResult,
    Exceptions(
        of_struct=("arguments_json", "content_json"),
        write={
            "arguments_sha256": lambda note: hashlib.sha256(note.arguments_json).hexdigest(),
            "result_sha256": lambda note: hashlib.sha256(note.content_json).hexdigest(),
            "result_bytes": lambda note: len(note.content_json),
        },
    ),
)
_EXECUTION: Final = wire.WIRE.struct(Execution, execution_pb2.ExecuteToolRequest, Exceptions(of_message=("context",)))
_TOOL: Final = wire.WIRE.struct(
    Tool,
    tool_pb2.Tool,
    Exceptions(
        read={
            "name": lambda tool: tool.definition.name,
            "description": lambda tool: tool.definition.description,
            "arguments_schema_json": lambda tool: tool.definition.arguments_schema_json,
            "fallback_tool_name": lambda tool: tool.definition.fallback_tool_name,
            "context": lambda tool: _CONTEXTS.read(tool.definition.context) if tool.definition.context else None,
        },
        of_message=("definition", "source", "create_time"),
        of_struct=("own_definition", "definition_sha256"),
    ),
)
_READS: Final = wire.WIRE.struct(ReadTimeouts, execution_pb2.ExecuteReads)
wire.WIRE.struct(ExecutionResult, execution_pb2.ExecutionResult, Exceptions(of_message=("duration_seconds",)))
_VERDICT: Final = wire.WIRE.struct(Verdict, execution_pb2.Verdict)
_PIECE: Final = wire.WIRE.one_of(
    execution_pb2.ExecuteToolResponse, "kind", {"progress": Progress, "result": ExecutionResult}
)
_OUTPUT: Final = wire.WIRE.struct(OutputChecked, execution_pb2.CheckOutputResponse)
_STOPPED: Final = wire.WIRE.struct(Stopped, execution_pb2.CancelExecutionResponse)


class RegistryClient:
    """A `Registry` over a channel to tool-registry, with additional methods for serving clients. It does not retry."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = execution_pb2_grpc.ExecutionServiceStub(channel)

    async def resolve(
        self,
        context: CallContext,
        names: Sequence[str],
        pinned: Sequence[PinnedTool] = (),
        *,
        most: int = 0,
        skip_missing: bool = False,
    ) -> Resolved:
        request = execution_pb2.ResolveToolsRequest(
            context=_CONTEXT.fields(context),
            tool_names=names,
            pinned_versions={tool.name: tool.version for tool in pinned},
            tools_max=most,
            skip_missing=skip_missing,
        )
        response = await translated(self._stub.ResolveTools(request))
        return Resolved(tools=tuple(map(_TOOL.read, response.tools)), left_out=response.left_out_count)

    async def check_own(self, caller: Principal, definitions: Sequence[bytes]) -> tuple[Tool, ...]:
        """Validate a client's tools for one of the user's runs. Return them in the form that the run stores.

        Raises:
            InvalidField, InvalidSchema, ToolExists
        """
        request = execution_pb2.CheckOwnToolsRequest(
            context=_user_context(caller), definitions=map(tool_pb2.ToolDefinition.FromString, definitions)
        )
        response = await translated(self._stub.CheckOwnTools(request))
        return tuple(map(wire.OWN_TOOL.read, response.tools))

    async def offered(self, caller: Principal) -> tuple[OfferedTool, ...]:
        request = execution_pb2.ResolveToolsRequest(context=_user_context(caller), with_opt_in=True)
        response = await translated(self._stub.ResolveTools(request))
        return tuple(
            OfferedTool(
                name=tool.definition.name,
                source=tool.source,
                arguments_schema_json=tool.definition.arguments_schema_json,
            )
            for tool in response.tools
        )

    async def put_workflow_tool(self, store_id: StoreId, workflow: WorkflowVersion, *, validate_only: bool) -> None:
        """Register a workflow as a tool of its store. If the version has no `as_tool`, remove that tool.

        Raises:
            ToolExists: The name belongs to another tool.
            InvalidSchema, InvalidField
        """
        request = execution_pb2.PutWorkflowToolRequest(
            store_id=store_id, name=workflow.name, validate_only=validate_only
        )
        if workflow.as_tool:
            request.description = workflow.description
            request.input_schema_json = workflow.input_schema_json
        await translated(self._stub.PutWorkflowTool(request))

    async def check(
        self,
        context: CallContext,
        calls: Sequence[ProposedCall],
        known_tool_names: Sequence[str],
        reads: ReadTimeouts | None = None,
    ) -> tuple[Verdict, ...]:
        request = execution_pb2.CheckCallsRequest(
            context=_CONTEXT.fields(context),
            calls=map(_PROPOSED.fields, calls),
            known_tool_names=known_tool_names,
            execute_reads=_READS.fields(reads) if reads else None,
        )
        response = await translated(self._stub.CheckCalls(request))
        return tuple(map(_VERDICT.read, response.verdicts))

    async def record_decisions(self, context: CallContext, decisions: Sequence[RecordedDecision]) -> None:
        request = execution_pb2.RecordDecisionsRequest(
            context=_CONTEXT.fields(context), decisions=map(_DECISION.fields, decisions)
        )
        await translated(self._stub.RecordDecisions(request))

    async def record_results(self, context: CallContext, results: Sequence[RecordedResult]) -> None:
        request = execution_pb2.RecordResultsRequest(
            context=_CONTEXT.fields(context), results=map(_RESULT_NOTE.fields, results)
        )
        await translated(self._stub.RecordResults(request))

    async def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        request = execution_pb2.ExecuteToolRequest(context=_CONTEXT.fields(context), **_EXECUTION.fields(execution))
        stream = self._stub.ExecuteTool(request)
        try:
            with translating():
                async for response in stream:
                    yield _PIECE.read(response)
        finally:
            stream.cancel()

    async def cancel(self, context: CallContext, call_id: CallId, *, wait_seconds: float) -> Stopped:
        request = execution_pb2.CancelExecutionRequest(
            context=_CONTEXT.fields(context), call_id=call_id, wait_seconds=wait_seconds
        )
        response = await translated(self._stub.CancelExecution(request, timeout=wait_seconds + _CANCEL_MARGIN_SECONDS))
        return _STOPPED.read(response)

    async def check_answer(self, store_id: StoreId, answer_schema_json: bytes, answer: str) -> None:
        """Validate an answer to a running tool's question.

        Raises:
            InvalidArguments: The answer does not match the schema. The message explains why.
        """
        request = execution_pb2.CheckAnswerRequest(
            store_id=store_id, answer_schema_json=answer_schema_json, answer=answer
        )
        await translated(self._stub.CheckAnswer(request))

    async def read_document(self, caller: Principal, file: FilePart) -> str:
        """Return the current text of a document that the caller can read.

        Raises:
            DocumentNotFound
            InvalidField: The name is invalid.
        """
        request = execution_pb2.ReadDocumentRequest(
            store_id=caller.store_id, user_id=caller.user_id, name=file.document_name, shared=file.shared
        )
        return (await translated(self._stub.ReadDocument(request))).text

    async def check_output(self, store_id: StoreId, schema_json: bytes, output: str | None) -> OutputChecked:
        """Validate an answer against a response format's schema. If `output` is None, validate only the schema.

        Raises:
            InvalidSchema: The schema cannot be used.
            Overloaded, DependencyUnavailable: The check is not currently possible.
        """
        asked = None if output is None else output.encode()
        request = execution_pb2.CheckOutputRequest(store_id=store_id, schema_json=schema_json, output=asked)
        return _OUTPUT.read(await translated(self._stub.CheckOutput(request)))

    async def check_edit(
        self, read: GetRunResponse, call: call_pb2.Call, arguments_json: bytes, series: Series | None = None
    ) -> Verdict:
        """Return the verdict on the call's edited arguments. The run's user must be allowed to make the call.

        If `series` is set, the verdict contains the digest for granting the series with these arguments.

        Raises:
            InvalidArguments: The arguments are not allowed. The message lists all problems.
        """
        own_tools = (wire.OWN_TOOL.read(tool) for tool in read.own_tools)
        proposed = ProposedCall(
            call_id=CallId(call.call_id),
            tool_name=call.tool_name,
            tool_version=call.tool_version,
            arguments_json=arguments_json,
            edited=True,
            series=series,
            own_tool=next((tool for tool in own_tools if tool.name == call.tool_name), None),
        )
        # The editor decides for the run's user, and that user must be allowed to make the call.
        (verdict,) = await self.check(CallContext.of(wire.RUN.read(read.run)), [proposed], [call.tool_name])
        if verdict.disposition is Disposition.REFUSE:
            raise InvalidArguments(verdict.error_message)
        return verdict

    async def check_job(self, caller: Principal, run: Run, now: float) -> Verdict:
        job = run.job
        if job is None:
            raise RuntimeError("the run is not a job")
        context = CallContext.of(run)
        found = await self.resolve(context, [job.tool_name], skip_missing=True)
        pinned = tuple(PinnedTool(name=tool.name, version=tool.version) for tool in found.tools)
        known = [tool.name for tool in pinned] or [tool.name for tool in await self.offered(caller)]
        proposed = proposals.to_check(replace(run, tools=pinned), [jobs.draft(run, job, now)])
        (verdict,) = await self.check(context, proposed, known)
        schema = found.tools[0].arguments_schema_json if found.tools else b""
        return hints.for_request(verdict, job.arguments_json, schema)

    async def count_tools(self, caller: Principal) -> int:
        request = execution_pb2.ResolveToolsRequest(context=_user_context(caller), tools_max=1)
        response = await translated(self._stub.ResolveTools(request))
        return len(response.tools) + response.left_out_count


def _user_context(caller: Principal) -> execution_pb2.CallContext:
    return execution_pb2.CallContext(store_id=caller.store_id, user_id=caller.user_id, user_roles=sorted(caller.roles))
