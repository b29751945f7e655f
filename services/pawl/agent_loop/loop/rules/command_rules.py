"""Changes a run's state according to commands that the ledger has already accepted."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import delegation, fact_rules, order, programs, proposals, settle
from pawl.agent_loop.loop.rules.call import ApprovalRequest, Call, CallResult, UserDecision
from pawl.agent_loop.loop.rules.fact import (
    AgentEnded,
    Cancel,
    Command,
    Completed,
    Decide,
    Event,
    Pause,
    Progress,
    RaiseGoal,
    Resolve,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.agent_loop.loop.rules.run import Grant
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import RecordedDecision, RecordedResult
from pawl.chassis import strict_json
from pawl.chassis.ids import UserId
from pawl.values import CallResolution, CallState, DecisionKind, ExecutionContext, RunState

_WITHDRAWN = "The user sent a new message before this call started, so it was not run."
_DID_NOT_HAPPEN = "An operator found that this call did not happen."


def apply_command(state: State, command: Command, now: float) -> State:
    """Apply `command`. A command about a call that is no longer pending has no effect."""
    match command.kind:
        case ToolResult() as result:
            call = state.calls.get(result.call_id)
            if call is None or call.state is not CallState.OFFERED:
                return state
            note = state.loop.notes.get(call.call_id, "")
            return state.with_calls([_with_result(call, result, now, note)])
        case Decide() as decision:
            return _decided(state, command, decision, now)
        case Steer() as steer:
            return _steered(state, steer, now)
        case Cancel() as cancel:
            run = replace(state.run, state=RunState.CANCELLING, stop_cause=cancel.cause, waits=())
            return replace(state, run=run)
        case Resolve() as resolution:
            return _resolved(state, resolution, now)
        case TopUp() as top_up:
            added = state.loop.tokens_added + top_up.tokens
            if state.shared_tokens_max is not None:
                state = replace(state, shared_tokens_max=state.shared_tokens_max + top_up.tokens)
            return replace(state, loop=replace(state.loop, tokens_added=added, top_up_deadline_time=None))
        case RaiseGoal() as raised:
            state = apply_command(state, replace(command, kind=TopUp(tokens=raised.tokens)), now)
            return programs.of(state.run).commanded(state, command, now)
        case Pause() | Event():
            return programs.of(state.run).commanded(state, command, now)
        case Completed():
            return fact_rules.completed(state, command.kind.call_id)
        case AgentEnded() as ended:
            return delegation.ended(state, ended, now)
        case Progress():
            return state
        case _:
            assert_never(command.kind)


def decisions(state: State) -> tuple[RecordedDecision, ...]:
    """Return the decisions on gated calls among the state's unconsumed commands."""
    return tuple(
        RecordedDecision(
            call_id=call.call_id,
            tool_name=call.tool_name,
            tool_version=call.tool_version,
            kind=command.kind.kind,
            user_id=command.user_id,
            arguments_json=command.kind.arguments_json or call.arguments_json,
            credential_id=command.credential_id,
            delegate_user_id=command.delegate_user_id,
            definition_sha256=state.run.definition_sha256(call.tool_name),
            for_series=command.kind.for_series,
        )
        for command in state.commands
        if isinstance(command.kind, Decide)
        and (call := state.calls.get(command.kind.call_id)) is not None
        and call.approval is not None
        and not call.asks_in_mid_execution
    )


def results(state: State) -> tuple[RecordedResult, ...]:
    """Return the results of front-end calls among the state's unconsumed commands."""
    return tuple(
        replace(
            _result_note(state, _with_result(call, command.kind, command.time), command.user_id),
            credential_id=command.credential_id,
            delegate_user_id=command.delegate_user_id,
        )
        for command in state.commands
        if isinstance(command.kind, ToolResult)
        and (call := state.calls.get(command.kind.call_id)) is not None
        and call.state is CallState.OFFERED
    )


def withdrawn_results(state: State) -> tuple[RecordedResult, ...]:
    """Return the last two rounds' leased front-end calls that ended without a result from the client."""
    return tuple(
        _result_note(state, call, state.run.user_id)
        for call in state.calls.values()
        if call.run_id == state.run.run_id
        # The step that settles the last call of a round also starts the next round.
        and call.round >= state.run.round - 1
        and call.context is ExecutionContext.FRONTEND
        and call.state in {CallState.EXPIRED, CallState.CANCELLED}
        and call.start_time is not None
        and call.question is None
    )


def may_have_been_held(base: State, after: State) -> bool:
    """Return whether a step withdraws a front-end call that a client may have leased since the run was loaded."""
    withdrawn_calls = (after.calls[call.call_id] for call in base.open_calls if call.state is CallState.OFFERED)
    return any(
        call.state in {CallState.EXPIRED, CallState.CANCELLED} and call.start_time is None for call in withdrawn_calls
    )


def _result_note(state: State, call: Call, user_id: UserId) -> RecordedResult:
    started, ended = call.start_time, call.end_time
    return RecordedResult(
        call_id=call.call_id,
        tool_name=call.tool_name,
        tool_version=call.tool_version,
        user_id=user_id,
        arguments_json=call.arguments_json,
        content_json=call.result.content_json if call.result else b"",
        state=call.state,
        duration_seconds=0.0 if started is None or ended is None else max(0.0, ended - started),
        definition_sha256=state.run.definition_sha256(call.tool_name),
    )


def others_change_calls(state: State) -> bool:
    """Return whether the ledger may change open calls itself, by leasing offers or counting approvals."""
    return bool(shared_decisions(state)) or any(call.state is CallState.OFFERED for call in state.open_calls)


def approvals_given(state: State) -> tuple[RecordedDecision, ...]:
    """Return approvals of calls that several users must approve.

    Includes edits, and approvals given before an edit.
    """
    return tuple(
        RecordedDecision(
            call_id=call.call_id,
            tool_name=call.tool_name,
            tool_version=call.tool_version,
            kind=given.kind,
            user_id=given.user_id,
            arguments_json=b"" if given.arguments_sha256 else call.arguments_json,
            arguments_sha256=given.arguments_sha256,
            credential_id=given.credential_id,
            delegate_user_id=given.delegate_user_id,
            definition_sha256=state.run.definition_sha256(call.tool_name),
            for_series=given.series is not None,
        )
        for call in shared_decisions(state)
        if call.approval is not None
        for given in (*call.approval.earlier_approvals, *call.approval.approvals)
    )


def shared_decisions(state: State) -> tuple[Call, ...]:
    """Return the calls that require several approvals. The ledger changes such a call with each approval."""
    return tuple(
        call
        for call in state.open_calls
        if call.state is CallState.AWAITING_APPROVAL
        and call.approval is not None
        and call.approval.approvals_required > 1
    )


def _with_result(call: Call, command: ToolResult, now: float, note: str = "") -> Call:
    result = command.result
    if result.is_error and not result.error_reason:
        result = replace(result, error_reason="TOOL_ERROR")
    outcome = CallState.FAILED if result.is_error else CallState.SUCCEEDED
    return settle.settled(call, outcome, result, now, note)


def _decided(state: State, command: Command, decision: Decide, now: float) -> State:
    call = state.calls.get(decision.call_id)
    if call is None or call.state not in {CallState.AWAITING_APPROVAL, CallState.ASKED}:
        return state
    if call.asks_in_mid_execution:
        if state.run.state is RunState.CANCELLING:
            return state  # The cancellation stops its tool instead.
        return fact_rules.answered(state, call, decision.answer if decision.kind is DecisionKind.ANSWER else None)
    if call.approval is not None:
        call = replace(call, approval=_approval(call.approval, command, decision))
    if call.approval is not None and decision.kind is DecisionKind.EDIT and call.approval.decision is None:
        # Others must approve the edited call, so show the request again.
        return state.with_calls([replace(call, arguments_json=decision.arguments_json)])
    is_only_approval = call.context is ExecutionContext.HUMAN and call.question is None
    match decision.kind:
        case DecisionKind.ANSWER if is_only_approval:
            call = _rejected(call, decision.answer, now)
        case DecisionKind.ANSWER:
            call = _answered(call, decision.answer, now)
        case DecisionKind.REJECT:
            call = _rejected(call, decision.reason, now)
        case DecisionKind.EDIT:
            call = proposals.released(
                replace(call, arguments_json=decision.arguments_json), state.run.options.limits, now
            )
        case DecisionKind.APPROVE if is_only_approval:
            # A call that only asks for an approval.
            result = CallResult(content_json=strict_json.dumps_canonical({"answer": True}))
            call = settle.settled(call, CallState.SUCCEEDED, result, now)
        case DecisionKind.APPROVE:
            call = proposals.released(call, state.run.options.limits, now)
    return _granted(state.with_calls([call]), call)


def _granted(state: State, call: Call) -> State:
    job, approval = state.run.job, call.approval
    if job is None or approval is None or approval.series is None:
        return state
    if approval.decision is None or approval.decision.series is None:
        return state
    series = approval.series
    job = replace(
        job,
        arguments_json=call.arguments_json,
        interval_seconds=series.interval_seconds,
        # If an edit allows fewer iterations than have already run, the current one is the last.
        iterations_max=max(series.iterations_max, call.round),
        end_time=series.end_time,
    )
    grant = Grant(series=series, call_id=call.call_id, approvals=approval.approvals)
    return replace(state, run=replace(state.run, job=job, grant=grant))


def _approval(approval: ApprovalRequest, command: Command, decision: Decide) -> ApprovalRequest:
    decided = UserDecision(
        kind=decision.kind,
        user_id=command.user_id,
        reason=decision.reason,
        time=command.time,
        credential_id=command.credential_id,
        delegate_user_id=command.delegate_user_id,
        series=decision.edited_series or (approval.series if decision.for_series else None),
    )
    if decision.kind is not DecisionKind.EDIT:
        approves = decision.kind is DecisionKind.APPROVE
        approvals = (*approval.approvals, decided) if approves else approval.approvals
        return replace(approval, decision=decided, approvals=approvals)
    return replace(
        approval,
        decision=decided if approval.approvals_required == 1 else None,
        digest=decision.edited_digest,
        preview=decision.edited_preview,
        approvals=(decided,),
        series=decision.edited_series,
    )


def _answered(call: Call, answer: str, now: float) -> Call:
    content = strict_json.dumps_canonical({"answer": answer})
    if call.state is CallState.AWAITING_APPROVAL:
        note = f"{call.tool_name} was not run. A reviewer gave this answer instead."
    else:
        note = f"No client ran {call.tool_name}, so the user gave this answer instead." if call.offer else ""
    return settle.settled(call, CallState.SUCCEEDED, CallResult(content_json=content), now, note)


def _rejected(call: Call, reason: str, now: float) -> Call:
    what = "approve this call" if call.state is CallState.AWAITING_APPROVAL else "answer"
    message = f"The user refused to {what}." + (f" Reason: {reason}" if reason else "")
    return settle.settled(call, CallState.REJECTED, settle.error("REJECTED", message), now)


def _steered(state: State, steer: Steer, now: float) -> State:
    """Withdraw the calls that are waiting for the user, who has sent a steering message. Other calls continue."""
    for call in state.open_calls:
        if call.asks_in_mid_execution and state.run.state is not RunState.CANCELLING:
            state = fact_rules.answered(state, call, None)
    withdrawn = [
        settle.withdrawn(call, _WITHDRAWN, now)
        for call in state.open_calls
        if not call.attempt and order.is_withdrawn_by_steer(call, state.batch)
    ]
    loop = replace(state.loop, steers=(*state.loop.steers, steer.text))
    return replace(state.with_calls(withdrawn), loop=loop)


def _resolved(state: State, command: Resolve, now: float) -> State:
    call = state.calls.get(command.call_id)
    if call is None or call.state is not CallState.RUNNING or call.call_id not in state.loop.in_doubt:
        return state
    in_doubt = tuple(call_id for call_id in state.loop.in_doubt if call_id != call.call_id)
    state = replace(state, loop=replace(state.loop, in_doubt=in_doubt))
    note = state.loop.notes.get(call.call_id, "")
    match command.resolution:
        case CallResolution.HAPPENED:
            result = CallResult(content_json=command.content_json or b"null")
            return state.with_calls([settle.settled(call, CallState.SUCCEEDED, result, now, note)])
        case CallResolution.TELL_MODEL:
            result = settle.error("TOOL_ERROR", _DID_NOT_HAPPEN)
            return state.with_calls([settle.settled(call, CallState.FAILED, result, now, note)])
        case CallResolution.RUN_AGAIN:
            # Make it runnable again, so that this command takes effect even if the run is cancelled and the call is
            # withdrawn.
            found = {**state.loop.unknowns_resolved}
            found[call.call_id] = found.get(call.call_id, 0) + 1
            state = state.with_calls([replace(call, state=CallState.RUNNABLE)])
            return replace(state, loop=replace(state.loop, unknowns_resolved=found))
