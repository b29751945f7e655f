"""Values of the loop from and to messages of pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent_loop.domain.call import (
    ApprovalRequest,
    Call,
    CallResult,
    CallState,
    Decided,
    DecisionKind,
    EffectClass,
    ExecutionContext,
    Inverse,
    OfferFallback,
    OfferLease,
    Question,
    QuestionKind,
    ToolCategory,
)
from pawl.agent_loop.domain.failure import FailureClass
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.loop_state import NewerVersion
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.run import (
    ApprovalExpiryPolicy,
    BatchOrder,
    PinnedTool,
    RoundLimitPolicy,
    Run,
    RunAbove,
    RunFailure,
    RunOptions,
    RunState,
    StopCause,
    TokenBudgetPolicy,
    ToolChoice,
    ToolChoiceMode,
    Undo,
    UnknownOutcomePolicy,
    Usage,
    WaitKind,
)
from pawl.event.v1 import call_pb2, message_pb2, run_pb2

E = TypeVar("E", bound=StrEnum)


def named(kind: type[E], enum: Any, prefix: str, number: int, default: E | None = None) -> E:
    """Return the value of a number of `enum`; `default` for UNSPECIFIED and for numbers of a newer version.

    Raises:
        NewerVersion: there is none, and no default.
    """
    try:
        return kind(enum.Name(number).removeprefix(prefix))
    except ValueError:
        if default is None:
            raise NewerVersion(f"{prefix}{number} is not known to this version") from None
        return default


def seconds(time: Timestamp) -> float:
    """Return a time as seconds since 1970."""
    return time.seconds + time.nanos / 1e9


def set_time(target: Timestamp, time: float) -> None:
    """Set a time from seconds since 1970."""
    target.FromMicroseconds(round(time * 1e6))


def optional_seconds(message: ProtoMessage, field: str) -> float | None:
    """Return a time that may be absent."""
    return seconds(getattr(message, field)) if message.HasField(field) else None


def run(message: run_pb2.Run) -> Run:
    """Return a run as the loop sees it."""
    return Run(
        store_id=message.store_id,
        user_id=message.user_id,
        conversation_id=message.conversation_id,
        run_id=message.run_id,
        state=named(RunState, run_pb2.RunState, "RUN_STATE_", message.state),
        waits=tuple(named(WaitKind, run_pb2.WaitKind, "WAIT_KIND_", wait) for wait in message.waits),
        options=_options(message.options),
        tools=tuple(PinnedTool(name=tool.name, version=tool.version) for tool in message.tools),
        round=message.round,
        last_seq=message.last_seq,
        usage=usage(message.usage),
        failure=failure(message.failure) if message.HasField("failure") else None,
        stop_cause=named(StopCause, run_pb2.StopCause, "STOP_CAUSE_", message.stop_cause)
        if message.stop_cause
        else None,
        output_text=message.output_text,
        active_seconds=message.active_seconds,
        unstopped_call_ids=tuple(message.unstopped_call_ids),
        user_roles=tuple(message.user_roles),
        undo=undo(message.undo) if message.HasField("undo") else None,
        parent_run_id=message.parent_run_id,
        parent_call_id=message.parent_call_id,
        depth=message.depth,
        above=tuple(RunAbove(run_id=each.run_id, conversation_id=each.conversation_id) for each in message.above),
    )


def above_message(above: RunAbove) -> run_pb2.RunAbove:
    """Return a run that stands above another one as the contract words it."""
    return run_pb2.RunAbove(run_id=above.run_id, conversation_id=above.conversation_id)


def undo(message: run_pb2.Undo) -> Undo:
    """Return what a run takes back."""
    return Undo(run_id=message.run_id, call_id=message.call_id, user_id=message.user_id)


def undo_message(undo: Undo) -> run_pb2.Undo:
    """Return what a run takes back as the contract words it."""
    return run_pb2.Undo(run_id=undo.run_id, call_id=undo.call_id, user_id=undo.user_id)


def stop_cause(number: int) -> StopCause:
    """Return who asked a run to stop."""
    return named(StopCause, run_pb2.StopCause, "STOP_CAUSE_", number, default=StopCause.USER)


def _options(message: run_pb2.RunOptions) -> RunOptions:
    mode = named(
        ToolChoiceMode, run_pb2.ToolChoice.Mode, "MODE_", message.tool_choice.mode, default=ToolChoiceMode.AUTO
    )
    return RunOptions(
        model=message.model,
        instructions=message.instructions,
        tool_names=tuple(message.tool_names),
        without_tools=message.without_tools,
        tool_choice=ToolChoice(mode=mode, tool_name=message.tool_choice.tool_name),
        limits=_limits(message.limits),
        round_limit_policy=named(
            RoundLimitPolicy,
            run_pb2.RoundLimitPolicy,
            "ROUND_LIMIT_POLICY_",
            message.round_limit_policy,
            default=RoundLimitPolicy.FINAL_ANSWER,
        ),
        batch_order=named(
            BatchOrder,
            run_pb2.BatchOrder,
            "BATCH_ORDER_",
            message.batch_order,
            default=BatchOrder.WAIT_FOR_DECISIONS,
        ),
        unknown_outcome_policy=named(
            UnknownOutcomePolicy,
            run_pb2.UnknownOutcomePolicy,
            "UNKNOWN_OUTCOME_POLICY_",
            message.unknown_outcome_policy,
            default=UnknownOutcomePolicy.TELL_MODEL,
        ),
        token_budget_policy=named(
            TokenBudgetPolicy,
            run_pb2.TokenBudgetPolicy,
            "TOKEN_BUDGET_POLICY_",
            message.token_budget_policy,
            default=TokenBudgetPolicy.WAIT,
        ),
        approval_expiry_policy=named(
            ApprovalExpiryPolicy,
            run_pb2.ApprovalExpiryPolicy,
            "APPROVAL_EXPIRY_POLICY_",
            message.approval_expiry_policy,
            default=ApprovalExpiryPolicy.DENY,
        ),
        approvals_required=message.approvals_required,
        temperature=message.temperature if message.HasField("temperature") else None,
        output_tokens_max=message.output_tokens_max if message.HasField("output_tokens_max") else None,
    )


def _limits(message: run_pb2.RunLimits) -> Limits:
    found = {field.name: value for field, value in message.ListFields()}
    # Runs of the version before this one have no ceilings apart.
    for name in ("tool_timeout_seconds", "answer_timeout_seconds"):
        if name in found:
            found.setdefault(f"{name}_max", found[name])
    return Limits(**found)


def usage(message: run_pb2.Usage) -> Usage:
    """Return what model calls used."""
    return Usage(
        input_tokens=message.input_tokens,
        cached_input_tokens=message.cached_input_tokens,
        output_tokens=message.output_tokens,
        reasoning_tokens=message.reasoning_tokens,
        model_calls=message.model_calls,
        estimated_tokens=message.estimated_tokens,
    )


def usage_message(usage: Usage) -> run_pb2.Usage:
    """Return usage as the contract words it."""
    return run_pb2.Usage(
        input_tokens=usage.input_tokens,
        cached_input_tokens=usage.cached_input_tokens,
        output_tokens=usage.output_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        model_calls=usage.model_calls,
        estimated_tokens=usage.estimated_tokens,
    )


def failure(message: run_pb2.RunFailure) -> RunFailure:
    """Return why a run failed."""
    group = named(
        FailureClass, run_pb2.FailureClass, "FAILURE_CLASS_", message.failure_class, default=FailureClass.INTERNAL
    )
    return RunFailure(failure_class=group, reason=message.reason, message=message.message)


def message_of(message: message_pb2.Message) -> Message:
    """Return an entry of the conversation as the loop sees it."""
    return Message(
        role=named(Role, message_pb2.Role, "ROLE_", message.role),
        run_id=message.run_id,
        text=message.text,
        message_id=message.message_id,
        number=message.number,
        reasoning=message.reasoning,
        provider_state_json=message.provider_state_json,
        call_ids=tuple(message.call_ids),
        interrupted=message.interrupted,
        refusal=message.refusal,
        first_output_seq=message.first_output_seq,
        last_output_seq=message.last_output_seq,
        summarised_to_number=message.summarised_to_number,
    )


def message_message(message: Message) -> message_pb2.Message:
    """Return a new entry of the conversation as the contract words it."""
    return message_pb2.Message(
        role=message_pb2.Role.Value(f"ROLE_{message.role}"),
        text=message.text,
        reasoning=message.reasoning,
        provider_state_json=message.provider_state_json,
        call_ids=message.call_ids,
        interrupted=message.interrupted,
        refusal=message.refusal,
        first_output_seq=message.first_output_seq,
        last_output_seq=message.last_output_seq,
        summarised_to_number=message.summarised_to_number,
    )


def call(message: call_pb2.Call) -> Call:
    """Return a call as the loop sees it."""
    fallback = named(
        OfferFallback, call_pb2.OfferFallback, "OFFER_FALLBACK_", message.offer_fallback, default=OfferFallback.FAIL
    )
    return Call(
        store_id=message.store_id,
        conversation_id=message.conversation_id,
        run_id=message.run_id,
        call_id=message.call_id,
        round=message.round,
        index=message.index,
        provider_call_id=message.provider_call_id,
        undoes_call_id=message.undoes_call_id,
        tool_name=message.tool_name,
        proposed_tool_name=message.proposed_tool_name,
        tool_version=message.tool_version,
        state=named(CallState, call_pb2.CallState, "CALL_STATE_", message.state),
        context=context(message.context),
        category=category(message.category),
        effect_class=effect_class(message.effect_class),
        arguments_json=message.arguments_json,
        proposed_arguments=message.proposed_arguments,
        attempt=message.attempt,
        parallel=message.parallel,
        resource_keys=tuple(message.resource_keys),
        timeout_seconds=message.timeout_seconds,
        deadline_time=optional_seconds(message, "deadline_time"),
        approval=_approval(message.approval) if message.HasField("approval") else None,
        question=question(message.question) if message.HasField("question") else None,
        offer=_offer(message.offer) if message.HasField("offer") else None,
        offer_fallback=fallback,
        fallback_tool_name=message.fallback_tool_name,
        result=result(message.result) if message.HasField("result") else _left_out(message.result_omitted_bytes),
        create_time=optional_seconds(message, "create_time"),
        start_time=optional_seconds(message, "start_time"),
        end_time=optional_seconds(message, "end_time"),
        rule_id=message.rule_id,
        child_run_id=message.child_run_id,
    )


def context(number: int) -> ExecutionContext:
    """Return where a tool runs."""
    return named(ExecutionContext, call_pb2.ExecutionContext, "EXECUTION_CONTEXT_", number)


def category(number: int) -> ToolCategory:
    """Return how much harm a tool can do."""
    return named(ToolCategory, call_pb2.ToolCategory, "TOOL_CATEGORY_", number)


def effect_class(number: int) -> EffectClass:
    """Return what may be done when an outcome is unknown."""
    return named(EffectClass, call_pb2.EffectClass, "EFFECT_CLASS_", number, default=EffectClass.AT_MOST_ONCE)


def question(message: call_pb2.Question) -> Question:
    """Return a question."""
    kind = named(
        QuestionKind, call_pb2.QuestionKind, "QUESTION_KIND_", message.kind, default=QuestionKind.CLARIFICATION
    )
    return Question(
        question=message.question,
        why=message.why,
        kind=kind,
        options=tuple(message.options),
        default_answer=message.default_answer,
        timeout_seconds=message.timeout_seconds,
        answer_schema_json=message.answer_schema_json,
    )


def result(message: call_pb2.CallResult) -> CallResult:
    """Return a result."""
    return CallResult(
        content_json=message.content_json,
        is_error=message.is_error,
        error_reason=message.error_reason,
        note=message.note,
        inverse=_inverse(message.inverse) if message.HasField("inverse") else None,
    )


def _inverse(message: call_pb2.Inverse) -> Inverse:
    return Inverse(tool_name=message.tool_name, arguments_json=message.arguments_json, summary=message.summary)


def _left_out(size_bytes: int) -> CallResult | None:
    """Return what stands for a result that the ledger left out; None if there is no result yet."""
    if not size_bytes:
        return None
    return CallResult(content_json=b"null", note=f"The result of {size_bytes} bytes is too large to be repeated here.")


def _approval(message: call_pb2.ApprovalRequest) -> ApprovalRequest:
    return ApprovalRequest(
        digest=message.digest,
        preview=message.preview,
        cause=message.cause,
        decision=_decided(message.decision) if message.HasField("decision") else None,
        approvals_required=max(1, message.approvals_required),
        approvals=tuple(map(_decided, message.approvals)),
        earlier_approvals=tuple(map(_decided, message.earlier_approvals)),
        escalated=message.escalated,
    )


def _decided(message: call_pb2.Decision) -> Decided:
    return Decided(
        kind=named(DecisionKind, call_pb2.DecisionKind, "DECISION_KIND_", message.kind),
        user_id=message.user_id,
        reason=message.reason,
        time=seconds(message.time),
        arguments_sha256=message.arguments_sha256,
    )


def _offer(message: call_pb2.OfferLease) -> OfferLease:
    return OfferLease(
        client_id=message.client_id, offer_epoch=message.offer_epoch, expire_time=seconds(message.expire_time)
    )


def call_message(call: Call) -> call_pb2.Call:
    """Return a call as the contract words it. Times that the ledger gives, and who holds an offer, are left out."""
    message = call_pb2.Call(
        call_id=call.call_id,
        round=call.round,
        index=call.index,
        provider_call_id=call.provider_call_id,
        undoes_call_id=call.undoes_call_id,
        tool_name=call.tool_name,
        proposed_tool_name=call.proposed_tool_name,
        tool_version=call.tool_version,
        state=call_pb2.CallState.Value(f"CALL_STATE_{call.state}"),
        context=call_pb2.ExecutionContext.Value(f"EXECUTION_CONTEXT_{call.context}"),
        category=call_pb2.ToolCategory.Value(f"TOOL_CATEGORY_{call.category}"),
        effect_class=call_pb2.EffectClass.Value(f"EFFECT_CLASS_{call.effect_class}"),
        arguments_json=call.arguments_json,
        proposed_arguments=call.proposed_arguments,
        attempt=call.attempt,
        parallel=call.parallel,
        resource_keys=call.resource_keys,
        timeout_seconds=call.timeout_seconds,
        offer_fallback=call_pb2.OfferFallback.Value(f"OFFER_FALLBACK_{call.offer_fallback}"),
        fallback_tool_name=call.fallback_tool_name,
        rule_id=call.rule_id,
        child_run_id=call.child_run_id,
    )
    if call.deadline_time is not None:
        set_time(message.deadline_time, call.deadline_time)
    if call.approval is not None:
        message.approval.digest = call.approval.digest
        message.approval.preview = call.approval.preview
        message.approval.cause = call.approval.cause
        message.approval.approvals_required = call.approval.approvals_required
        message.approval.escalated = call.approval.escalated
    if call.question is not None:
        message.question.question = call.question.question
        message.question.why = call.question.why
        message.question.kind = call_pb2.QuestionKind.Value(f"QUESTION_KIND_{call.question.kind}")
        message.question.options.extend(call.question.options)
        message.question.default_answer = call.question.default_answer
        message.question.timeout_seconds = call.question.timeout_seconds
        message.question.answer_schema_json = call.question.answer_schema_json
    if call.result is not None:
        message.result.content_json = call.result.content_json
        message.result.is_error = call.result.is_error
        message.result.error_reason = call.result.error_reason
        message.result.note = call.result.note
        if call.result.inverse is not None:
            message.result.inverse.tool_name = call.result.inverse.tool_name
            message.result.inverse.arguments_json = call.result.inverse.arguments_json
            message.result.inverse.summary = call.result.inverse.summary
    return message
