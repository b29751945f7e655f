"""Implements pawl.tool.v1.ExecutionService: resolve, check, execute and cancel. For services only."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pawl.chassis.ids import CallKey, StoreId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidArguments, InvalidField
from pawl.tool.v1 import execution_pb2 as pb
from pawl.tool.v1 import execution_pb2_grpc, tool_pb2
from pawl.tool_registry import convert
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.execution.batch_check import BatchCheck
from pawl.tool_registry.execution.executor import Executor
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.rules.registering import OWN_TOOLS_MAX, chosen, without_opt_in
from pawl.tools import wire
from pawl.tools.rules.definition import ASYNC_TIMEOUT_SECONDS_MAX

CALLS_MAX: Final = 1000
WAIT_SECONDS_MAX: Final = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExecutionServicer(execution_pb2_grpc.ExecutionServiceServicer):
    """Implements ExecutionService. `answer_problem` returns why an answer does not match its schema, or ""."""

    catalog: Catalog
    checks: BatchCheck
    executor: Executor
    audit: AuditTrail
    answer_problem: Callable[[StoreId, bytes, str], Awaitable[str]]
    documents: PostgresDocumentRepository

    async def ResolveTools(self, request: pb.ResolveToolsRequest, context: Context) -> pb.ResolveToolsResponse:
        caller = convert.caller_from(request.context)
        tools = await self.catalog.resolve(
            caller, request.tool_names, request.pinned_versions, skip_missing=request.skip_missing
        )
        if not request.tool_names and not request.with_opt_in:
            tools = without_opt_in(tools)
        taken = chosen(tools, request.tool_names, caller.user_id, request.tools_max)
        taken.sort(key=lambda tool: tool.definition.name)
        return pb.ResolveToolsResponse(tools=map(convert.tool_message, taken), left_out_count=len(tools) - len(taken))

    async def CheckOwnTools(self, request: pb.CheckOwnToolsRequest, context: Context) -> pb.CheckOwnToolsResponse:
        definitions = [convert.own_definition_from(message) for message in request.definitions[: OWN_TOOLS_MAX + 1]]
        digests = await self.catalog.check_own(convert.caller_from(request.context), definitions)
        tools = [
            tool_pb2.OwnTool(definition=wire.DEFINITION.write(definition), definition_sha256=digest)
            for definition, digest in zip(definitions, digests, strict=True)
        ]
        return pb.CheckOwnToolsResponse(tools=tools)

    async def PutWorkflowTool(self, request: pb.PutWorkflowToolRequest, context: Context) -> pb.PutWorkflowToolResponse:
        store_id = check_id(request.store_id, "store_id")
        definition = convert.workflow_tool_from(request) if request.input_schema_json else None
        await self.catalog.put_workflow(store_id, request.name, definition, validate_only=request.validate_only)
        return pb.PutWorkflowToolResponse()

    async def CheckCalls(self, request: pb.CheckCallsRequest, context: Context) -> pb.CheckCallsResponse:
        if len(request.calls) > CALLS_MAX:
            raise InvalidField(f"calls must have at most {CALLS_MAX} items, got {len(request.calls)}", field="calls")
        proposed = [
            (convert.call_context_from(request.context, call.call_id, call.traceparent), convert.proposed_from(call))
            for call in request.calls
        ]
        checked = await self.checks.check(proposed, request.known_tool_names, convert.read_timeouts_from(request))
        return pb.CheckCallsResponse(verdicts=itertools.starmap(convert.verdict_message, checked))

    async def CheckAnswer(self, request: pb.CheckAnswerRequest, context: Context) -> pb.CheckAnswerResponse:
        if problem := await self.answer_problem(StoreId(request.store_id), request.answer_schema_json, request.answer):
            raise InvalidArguments(f"the answer does not match its schema: {problem}")
        return pb.CheckAnswerResponse()

    async def CheckOutput(self, request: pb.CheckOutputRequest, context: Context) -> pb.CheckOutputResponse:
        store_id = check_id(request.store_id, "store_id")
        if not request.HasField("output"):
            await self.catalog.check_output_schema(store_id, request.schema_json)
            return pb.CheckOutputResponse()
        output_json, faults = await self.catalog.check_output(store_id, request.schema_json, request.output)
        return pb.CheckOutputResponse(output_json=output_json, faults=faults)

    async def ReadDocument(self, request: pb.ReadDocumentRequest, context: Context) -> pb.ReadDocumentResponse:
        store_id, user_id = check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id")
        _, text = await self.documents.read(store_id, user_id, shared=request.shared, name=request.name)
        return pb.ReadDocumentResponse(text=text)

    async def RecordDecisions(self, request: pb.RecordDecisionsRequest, context: Context) -> pb.RecordDecisionsResponse:
        await self.audit.write(_reported_drafts(self.audit, request, "decisions", convert.decision_from))
        return pb.RecordDecisionsResponse()

    async def RecordResults(self, request: pb.RecordResultsRequest, context: Context) -> pb.RecordResultsResponse:
        await self.audit.write(_reported_drafts(self.audit, request, "results", convert.result_from))
        return pb.RecordResultsResponse()

    async def ExecuteTool(
        self, request: pb.ExecuteToolRequest, context: Context
    ) -> AsyncIterator[pb.ExecuteToolResponse]:
        if not 0 <= request.timeout_seconds <= ASYNC_TIMEOUT_SECONDS_MAX:
            raise InvalidField(
                f"timeout_seconds must be between 0 and {ASYNC_TIMEOUT_SECONDS_MAX:g}, got {request.timeout_seconds:g}",
                field="timeout_seconds",
            )
        async with aclosing(self.executor.execute(convert.execute_request(request))) as items:
            async for item in items:
                if isinstance(item, ExecutionResult):
                    yield pb.ExecuteToolResponse(result=convert.RESULT.fields(item))
                else:
                    yield pb.ExecuteToolResponse(progress=convert.PROGRESS.fields(item))

    async def CancelExecution(self, request: pb.CancelExecutionRequest, context: Context) -> pb.CancelExecutionResponse:
        key = CallKey(check_id(request.context.store_id, "store_id"), check_id(request.call_id, "call_id"))
        if math.isnan(request.wait_seconds) or not 0 <= request.wait_seconds <= WAIT_SECONDS_MAX:
            raise InvalidField(
                f"wait_seconds must be between 0 and {WAIT_SECONDS_MAX:g}, got {request.wait_seconds:g}",
                field="wait_seconds",
            )
        stopped, result = await self.executor.cancel(key, request.wait_seconds)
        return pb.CancelExecutionResponse(stopped=stopped, result=convert.RESULT.fields(result) if result else None)


def _reported_drafts(audit: AuditTrail, request: Any, field: str, read: Callable[..., AuditDraft]) -> list[AuditDraft]:
    """Return the audit entries for a run's report about its calls. The audit chain ignores repeated entries."""
    messages = getattr(request, field)
    if not 1 <= len(messages) <= CALLS_MAX:
        raise InvalidField(f"{field} must have between 1 and {CALLS_MAX} items, got {len(messages)}", field=field)
    contexts = (convert.call_context_from(request.context, message.call_id) for message in messages)
    return [read(audit, context, message) for context, message in zip(contexts, messages, strict=True)]
