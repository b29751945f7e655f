"""The rules of the loop, which determine a run's next step from its entire state.

Pure functions without I/O. `decide` returns one decision. The rules here apply to every run, and the run's program
decides everything else.
"""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.loop.rules import budget, delegation, fact_rules, order, programs, settle, step
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import (
    CheckFallback,
    Decision,
    Decline,
    Delegate,
    Execute,
    Fail,
    Finish,
    Park,
    PinTools,
    PlanUndo,
    Propose,
    ReadCalls,
    ReadProgram,
    Resume,
    Settle,
    StartModel,
    StopCalls,
    StopModel,
    TakeOver,
    Wait,
)
from pawl.agent_loop.loop.rules.run import FailureClass, Run, RunFailure
from pawl.agent_loop.loop.rules.state import MODEL, START, State, check_of, stop_of
from pawl.chassis.identity.roles import APPROVERS
from pawl.values import ENDED, CallState, ExecutionContext, OfferFallback, RunState, WaitKind

_WAITS: Final = {
    CallState.OFFERED: WaitKind.TOOL_RESULT,
    CallState.AWAITING_APPROVAL: WaitKind.APPROVAL,
    CallState.ASKED: WaitKind.ANSWER,
    CallState.DELEGATED: WaitKind.AGENT,
}

# A run in these states can become COMPLETED.
IN_MOTION: Final = frozenset({RunState.QUEUED, RunState.RUNNING})

_JOB_SECONDS: Final = 86_400.0


def decide(state: State, now: float) -> Decision:
    """Return the next decision.

    These guarantees apply to every program. Unless the run is ending, the program decides first. Nothing starts once
    the run is CANCELLING or about to fail, and no model call starts once the token budget is used up. An open model
    call is handled before open calls. A run ends only when every call has its result.
    """
    if state.run.state in ENDED:
        return Wait(until=None)
    if state.run.state is RunState.CANCELLING or state.loop.failure is not None:
        return _end(state, now)
    failure = _limit_reached(state)
    if failure is not None:
        return Fail(failure=failure)
    following = _without_running(programs.of(state.run).follows(state, now), state)
    if not isinstance(following, Wait):
        return following
    if START in state.under_way:
        # Until its definition is read, a program cannot say how its calls continue.
        return Wait(until=_timeout_at(state, now))
    if state.loop.model_call is not None:
        return _continue_model(state, now)
    return _continue_calls(state, following, now)


def _without_running(decision: Decision, state: State) -> Decision:
    """Drop work that is already running.

    If the run is parked, resume it first, because it cannot complete directly.
    """
    match decision:
        case Propose():
            new = tuple(call for call in decision.calls if check_of(call.call_id) not in state.under_way)
            return Propose(calls=new) if new else Wait(until=None)
        case PinTools() | PlanUndo() | ReadCalls() | ReadProgram() if state.under_way.issuperset(decision.names):
            return Wait(until=None)
        case Finish(state=RunState.COMPLETED) if state.run.state not in IN_MOTION:
            return Resume()
        case _:
            return decision


def _end(state: State, now: float) -> Decision:
    if MODEL in state.under_way:
        return StopModel()
    # Settle first, even if other calls run: the ledger refuses steps in which a call of a cancelled run progresses,
    # such as one that was just approved.
    not_started = [call for call in state.open_calls if not _has_started(call, state)]
    if not_started:
        # Settle in several steps if necessary, so that large calls cannot prevent a run from ending.
        count = step.fitting([step.size_bytes(call) for call in not_started], step.BYTES_MAX)
        return Settle(
            calls=tuple(not_made(call, now) for call in not_started[:count]), is_part=count < len(not_started)
        )
    running = state.open_calls
    to_stop = tuple(call.call_id for call in running if stop_of(call.call_id) not in state.under_way)
    if to_stop:
        return StopCalls(call_ids=to_stop)
    if running:
        return Wait(until=None)
    if state.run.state is RunState.CANCELLING:
        return Finish(state=RunState.CANCELLED)
    return Finish(state=RunState.FAILED, failure=state.loop.failure)


def not_made(call: Call, now: float) -> Call:
    message = "The run was stopped before this call started."
    if call.state is CallState.DELEGATED:
        message = "The run was stopped before this call ended. The run that executed it was stopped too."
    return settle.withdrawn(call, message, now)


def _has_started(call: Call, state: State) -> bool:
    """Return whether the registry may be executing the call, because it is running or waiting for an answer."""
    is_answered = call.state is CallState.RUNNABLE and call.call_id in state.loop.answers
    return call.state is CallState.RUNNING or call.asks_in_mid_execution or is_answered


def _limit_reached(state: State) -> RunFailure | None:
    if state.run.times_itself:
        return None
    limits = state.run.options.limits
    if state.active_seconds >= limits.run_timeout_seconds:
        message = f"The run was active for more than {limits.run_timeout_seconds:g} seconds."
        if START in state.under_way:
            message += " It waited for its tools all this time: check that tool-registry is reachable."
        return RunFailure(failure_class=FailureClass.LIMIT, reason="RUN_TIMEOUT", message=message)
    if _is_in_round(state) and state.round_active_seconds >= limits.round_timeout_seconds:
        message = f"A round was active for more than {limits.round_timeout_seconds:g} seconds."
        return RunFailure(failure_class=FailureClass.LIMIT, reason="ROUND_TIMEOUT", message=message)
    return None


def _is_in_round(state: State) -> bool:
    return state.loop.model_call is not None or bool(state.open_calls)


def _timeout_at(state: State, now: float) -> float:
    if state.run.times_itself:
        # The program and its calls have their own deadlines. This only makes the run check them regularly.
        return now + _JOB_SECONDS
    limits = state.run.options.limits
    left = limits.run_timeout_seconds - state.active_seconds
    if state.run.round and _is_in_round(state):
        left = min(left, limits.round_timeout_seconds - state.round_active_seconds)
    return now + max(0.0, left)


def _continue_model(state: State, now: float) -> Decision:
    if MODEL in state.under_way:
        return Wait(until=_timeout_at(state, now))
    opened = state.loop.model_call
    if state.model_starts_in is None and (opened is None or not opened.held):
        return TakeOver()
    if budget.is_used_up(state):
        return budget.exhausted(state, now)
    if state.used_up is not None:
        return budget.waits_for_period(state, state.used_up, now)
    if opened is not None and opened.next_try_time is not None and opened.next_try_time > now:
        return Park(state=RunState.WAITING, waits=(WaitKind.PROVIDER,), wake_time=opened.next_try_time)
    return StartModel(delay_seconds=state.model_starts_in or 0.0)


def _continue_calls(state: State, following: Wait, now: float) -> Decision:
    """Let overdue approvals, questions and offers expire or fall back, and continue with the open calls.

    If there are no open calls, wait as the program requests.
    """
    overdue = [call for call in state.open_calls if call.deadline_time is not None and call.deadline_time <= now]
    to_check = next((call for call in overdue if _falls_back(call)), None)
    if to_check is not None and check_of(to_check.call_id) not in state.under_way:
        return CheckFallback(call_id=to_check.call_id)
    # A turn started by job notices does not wait for users.
    unasked = state.open_calls if state.run.is_turn else overdue
    unanswered = next((call for call in unasked if call.asks_in_mid_execution), None)
    if unanswered is not None:
        return Decline(call_id=unanswered.call_id)
    lapsed = tuple(settle.expired(call, state.run.options, now) for call in overdue if not _falls_back(call))
    if lapsed:
        return Settle(calls=lapsed)
    startable = tuple(call for call in state.open_calls if _can_start(call, state, now))
    delegable = next((call for call in startable if call.context is ExecutionContext.AGENT), None)
    if delegable is not None:
        to_read = delegation.to_read(delegable)
        if to_read is not None and delegable.call_id not in state.agents:
            return to_read
        return Delegate(call_id=delegable.call_id)
    if startable:
        return Execute(call_ids=tuple(call.call_id for call in startable))
    times = [*_deadlines(state, after=now), *([] if following.until is None else [following.until])]
    if state.under_way:
        return Wait(until=min([_timeout_at(state, now), *times]))
    return _park(state, following.waits, min(times, default=None), now)


def _falls_back(call: Call) -> bool:
    return call.state is CallState.OFFERED and call.offer_fallback is OfferFallback.BACKEND_TOOL


def _can_start(call: Call, state: State, now: float) -> bool:
    if call.call_id in state.under_way or call.call_id in state.loop.in_doubt:
        return False
    if call.state is CallState.RUNNING:
        # The call's worker died, or the call was completed externally. The registry knows the outcome by the call's id.
        return not fact_rules.awaits(state, call, now)
    return call.state is CallState.RUNNABLE and order.may_start(call, state.batch, state.run.options.batch_order)


def _wait_for(call: Call, run: Run) -> WaitKind | None:
    asked, asks = call.asked_user_id, call.state in {CallState.AWAITING_APPROVAL, CallState.ASKED}
    is_for_user = asked in {None, run.user_id} or (asked == "" and not APPROVERS.isdisjoint(run.user_roles))
    return WaitKind.PERSON if asks and not is_for_user else _WAITS.get(call.state)


def _park(state: State, others: tuple[WaitKind, ...], wake_time: float | None, now: float) -> Park:
    kinds = {_wait_for(call, state.run) for call in state.open_calls}
    if fact_rules.times(state, now):
        kinds.add(WaitKind.COMPLETION)
    waits = tuple(kind for kind in WaitKind if kind in kinds)
    if any(call.call_id in state.loop.in_doubt for call in state.open_calls):
        return Park(state=RunState.NEEDS_ATTENTION, waits=(), wake_time=wake_time)
    return Park(state=RunState.WAITING, waits=(*waits, *others) or (WaitKind.TIME,), wake_time=wake_time)


def _deadlines(state: State, *, after: float) -> list[float]:
    times = (call.deadline_time for call in state.open_calls)
    return [*(time for time in times if time is not None and time > after), *fact_rules.times(state, after)]
