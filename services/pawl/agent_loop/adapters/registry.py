"""The registry service: which tools there are, what may be done with calls, and doing it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from typing import Final

import grpc

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.app.ports import Execution, OnBehalfOf
from pawl.agent_loop.domain.call import ExecutionContext, OfferFallback
from pawl.agent_loop.domain.run import PinnedTool
from pawl.agent_loop.domain.tool import (
    DecisionNote,
    Disposition,
    ExecutionPiece,
    ExecutionProgress,
    ExecutionResult,
    Outcome,
    ProposedCall,
    Resolved,
    ResultNote,
    Stopped,
    Tool,
    Verdict,
)
from pawl.chassis.rpc_client import translating
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, execution_pb2_grpc, tool_pb2

# The answer to a cancel may come this much later than the wait it asked for.
_CANCEL_MARGIN_SECONDS: Final = 5.0


class RegistryClient:
    """A `Registry` over a channel to tool-registry. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = execution_pb2_grpc.ExecutionServiceStub(channel)

    async def resolve(
        self, context: OnBehalfOf, names: Sequence[str], pinned: Sequence[PinnedTool] = (), *, most: int = 0
    ) -> Resolved:
        request = execution_pb2.ResolveToolsRequest(
            context=_context(context),
            tool_names=names,
            pinned_versions={tool.name: tool.version for tool in pinned},
            tools_max=most,
        )
        with translating():
            response = await self._stub.ResolveTools(request)
        return Resolved(tools=tuple(map(_tool, response.tools)), left_out=response.left_out_count)

    async def check(
        self, context: OnBehalfOf, calls: Sequence[ProposedCall], known_tool_names: Sequence[str]
    ) -> tuple[Verdict, ...]:
        request = execution_pb2.CheckCallsRequest(
            context=_context(context),
            calls=[
                execution_pb2.ProposedCall(
                    call_id=call.call_id,
                    tool_name=call.tool_name,
                    tool_version=call.tool_version,
                    arguments_json=call.arguments_json,
                )
                for call in calls
            ],
            known_tool_names=known_tool_names,
        )
        with translating():
            response = await self._stub.CheckCalls(request)
        return tuple(map(_verdict, response.verdicts))

    async def record_decisions(self, context: OnBehalfOf, decisions: Sequence[DecisionNote]) -> None:
        request = execution_pb2.RecordDecisionsRequest(
            context=_context(context),
            decisions=[
                execution_pb2.RecordedDecision(
                    call_id=decision.call_id,
                    tool_name=decision.tool_name,
                    tool_version=decision.tool_version,
                    kind=call_pb2.DecisionKind.Value(f"DECISION_KIND_{decision.kind}"),
                    user_id=decision.user_id,
                    arguments_json=decision.arguments_json,
                    arguments_sha256=decision.arguments_sha256,
                )
                for decision in decisions
            ],
        )
        with translating():
            await self._stub.RecordDecisions(request)

    async def record_results(self, context: OnBehalfOf, results: Sequence[ResultNote]) -> None:
        request = execution_pb2.RecordResultsRequest(
            context=_context(context),
            results=[
                execution_pb2.RecordedResult(
                    call_id=result.call_id,
                    tool_name=result.tool_name,
                    tool_version=result.tool_version,
                    user_id=result.user_id,
                    arguments_sha256=hashlib.sha256(result.arguments_json).hexdigest(),
                    state=call_pb2.CallState.Value(f"CALL_STATE_{result.state}"),
                    result_sha256=hashlib.sha256(result.content_json).hexdigest(),
                    result_bytes=len(result.content_json),
                    duration_seconds=result.duration_seconds,
                )
                for result in results
            ],
        )
        with translating():
            await self._stub.RecordResults(request)

    async def execute(self, context: OnBehalfOf, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        request = execution_pb2.ExecuteToolRequest(
            context=_context(context),
            call_id=execution.call_id,
            tool_name=execution.tool_name,
            tool_version=execution.tool_version,
            arguments_json=execution.arguments_json,
            earlier_attempts=execution.earlier_attempts,
            unknowns_resolved=execution.unknowns_resolved,
            timeout_seconds=execution.timeout_seconds,
            approved_digest=execution.approved_digest,
            rule_id=execution.rule_id,
            answers=[
                execution_pb2.Answer(question=given.question, answer=given.answer, declined=given.declined)
                for given in execution.answers
            ],
        )
        stream = self._stub.ExecuteTool(request)
        try:
            with translating():
                async for response in stream:
                    yield _progress(response.progress) if response.HasField("progress") else _result(response.result)
        finally:
            stream.cancel()

    async def cancel(self, context: OnBehalfOf, call_id: str, *, wait_seconds: float) -> Stopped:
        request = execution_pb2.CancelExecutionRequest(
            context=_context(context), call_id=call_id, wait_seconds=wait_seconds
        )
        with translating():
            response = await self._stub.CancelExecution(request, timeout=wait_seconds + _CANCEL_MARGIN_SECONDS)
        return Stopped(
            stopped=response.stopped, result=_result(response.result) if response.HasField("result") else None
        )


def _context(context: OnBehalfOf) -> execution_pb2.CallContext:
    return execution_pb2.CallContext(
        store_id=context.store_id,
        user_id=context.user_id,
        conversation_id=context.conversation_id,
        run_id=context.run_id,
        user_roles=context.user_roles,
        approvals_required=context.approvals_required,
        above=map(wire.above_message, context.above),
    )


def _tool(message: tool_pb2.Tool) -> Tool:
    definition = message.definition
    return Tool(
        name=definition.name,
        version=message.version,
        description=definition.description,
        arguments_schema_json=definition.arguments_schema_json,
        fallback_tool_name=definition.fallback_tool_name,
        # One of a newer version cannot be called, and may be shown.
        context=wire.named(
            ExecutionContext,
            call_pb2.ExecutionContext,
            "EXECUTION_CONTEXT_",
            definition.context,
            default=ExecutionContext.UNSPECIFIED,
        ),
    )


def _verdict(message: execution_pb2.Verdict) -> Verdict:
    # What is not understood is not run.
    disposition = wire.named(
        Disposition,
        execution_pb2.Disposition,
        "DISPOSITION_",
        message.disposition,
        default=Disposition.REFUSE,
    )
    return Verdict(
        call_id=message.call_id,
        disposition=disposition,
        tool_version=message.tool_version,
        arguments_json=message.arguments_json,
        note=message.note,
        context=wire.context(message.context),
        category=wire.category(message.category),
        effect_class=wire.effect_class(message.effect_class),
        timeout_seconds=message.timeout_seconds,
        parallel=message.parallel,
        resource_keys=tuple(message.resource_keys),
        digest=message.digest,
        preview=message.preview,
        approval_cause=message.approval_cause,
        question=wire.question(message.question) if message.HasField("question") else None,
        offer_fallback=wire.named(
            OfferFallback,
            call_pb2.OfferFallback,
            "OFFER_FALLBACK_",
            message.offer_fallback,
            default=OfferFallback.FAIL,
        ),
        fallback_tool_name=message.fallback_tool_name,
        error_reason=message.error_reason,
        error_message=message.error_message,
        rule_id=message.rule_id,
        approvals_required=message.approvals_required,
    )


def _progress(message: execution_pb2.ExecutionProgress) -> ExecutionProgress:
    fraction = message.fraction if message.HasField("fraction") else None
    return ExecutionProgress(fraction=fraction, message=message.message)


def _result(message: execution_pb2.ExecutionResult) -> ExecutionResult:
    # An outcome of a newer version is one that this version does not know.
    outcome = wire.named(
        Outcome, execution_pb2.ExecutionOutcome, "EXECUTION_OUTCOME_", message.outcome, default=Outcome.UNKNOWN
    )
    question = wire.question(message.question) if message.HasField("question") else None
    return ExecutionResult(outcome=outcome, result=wire.result(message.result), question=question)
