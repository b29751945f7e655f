"""Changes of the state by the outcomes of this process's work."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from pawl.agent_loop.domain import answering, asking, proposals, settle
from pawl.agent_loop.domain.call import REPEATABLE, Call, CallState, ExecutionContext, Question
from pawl.agent_loop.domain.event import OwnerEvent, Warned
from pawl.agent_loop.domain.fact import (
    CallExecuted,
    CallStopped,
    Fact,
    FallbackChecked,
    InverseChecked,
    ModelAnswered,
    ModelCut,
    ModelFailed,
    RunRefused,
    ToolsPinned,
    UndoPlanned,
)
from pawl.agent_loop.domain.run import RunState, UnknownOutcomePolicy
from pawl.agent_loop.domain.state import State
from pawl.agent_loop.domain.tool import TOOLS_MAX, Outcome


def apply_fact(state: State, fact: Fact, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    """Return the state after `fact`, and the events that tell of it.

    A fact about a call that has been settled in the meantime changes nothing.
    """
    match fact:
        case ToolsPinned():
            return replace(state, run=replace(state.run, tools=fact.tools), tools_pinned=True), _left_out(fact)
        case RunRefused():
            return replace(state, loop=replace(state.loop, failure=fact.failure)), ()
        case ModelAnswered():
            return answering.answered(state, fact, now)
        case ModelFailed():
            return answering.failed(state, fact)
        case ModelCut():
            return answering.cut(state, fact), ()
        case CallExecuted():
            return _executed(state, fact, now), ()
        case CallStopped():
            return _stopped(state, fact, now)
        case FallbackChecked():
            return _fallen_back(state, fact, now), ()
        case UndoPlanned():
            run = replace(state.run, tools=fact.tools)
            return replace(state, run=run, loop=replace(state.loop, undo=fact.plan), tools_pinned=True), ()
        case InverseChecked():
            return _inverse_checked(state, fact, now), ()
        case _:
            assert_never(fact)


def _left_out(fact: ToolsPinned) -> tuple[OwnerEvent, ...]:
    if not fact.left_out:
        return ()
    message = f"{fact.left_out} tools were left out: a run has at most {TOOLS_MAX}. Name those that it needs."
    return (Warned(reason="TOOLS_LEFT_OUT", message=message),)


def _executed(state: State, fact: CallExecuted, now: float) -> State:
    call = state.calls[fact.call_id]
    if fact.ended.outcome is Outcome.INPUT_REQUIRED:
        is_running = call.state is CallState.RUNNING and state.run.state is not RunState.CANCELLING
        question = fact.ended.question or Question(question="What is the answer?")
        return asking.asked(state, call, question, now) if is_running else state
    policy = state.run.options.unknown_outcome_policy
    if (
        fact.ended.outcome is Outcome.UNKNOWN
        and policy is UnknownOutcomePolicy.NEEDS_ATTENTION
        and call.effect_class not in REPEATABLE
        and call.state is CallState.RUNNING
    ):
        doubted = (*state.loop.in_doubt, call.call_id)
        return replace(state, loop=replace(state.loop, in_doubt=doubted))
    return _settle(state, settle.executed(call, fact.ended, now, state.loop.notes.get(call.call_id, "")))


def _stopped(state: State, fact: CallStopped, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    call = state.calls[fact.call_id]
    if call.settled:
        return state, ()
    call = settle.stopped(call, fact.answer, now, state.loop.notes.get(call.call_id, ""))
    state = state.with_calls([call])
    if call.result is None or call.result.error_reason != settle.NOT_STOPPED:
        return state, ()
    run = replace(state.run, unstopped_call_ids=(*state.run.unstopped_call_ids, call.call_id))
    warned = Warned(reason=settle.NOT_STOPPED, message=f"{call.tool_name} could not be stopped: it may go on.")
    return replace(state, run=run), (warned,)


def _inverse_checked(state: State, fact: InverseChecked, now: float) -> State:
    """Begin the round of an inverse; one that began before, or comes too late, changes nothing."""
    planned = state.loop.undo
    is_stopped = state.run.state is RunState.CANCELLING or state.loop.failure is not None
    if is_stopped or state.loop.steers or planned is None or planned.reported or fact.call.call_id in state.calls:
        return state
    call = proposals.judged(fact.call, fact.verdict, state.run.options, now)
    notes = {call.call_id: fact.verdict.note} if fact.verdict.note else {}
    loop = replace(
        state.loop,
        notes=notes,
        unknowns_resolved={},
        answers={},
        in_doubt=(),
        round_began_active_seconds=state.active_seconds,
    )
    run = replace(state.run, state=RunState.RUNNING, waits=(), round=call.round)
    return replace(state, run=run, loop=loop).with_calls([call])


def _settle(state: State, call: Call) -> State:
    return state.with_calls([call]) if not state.calls[call.call_id].settled else state


def _fallen_back(state: State, fact: FallbackChecked, now: float) -> State:
    call = state.calls[fact.call_id]
    if call.state is not CallState.OFFERED:
        return state
    if fact.verdict.context in {ExecutionContext.FRONTEND, ExecutionContext.AGENT}:
        message = f"No client ran this call in time, and {call.fallback_tool_name} cannot run in its place."
        result = settle.error("EXPIRED", message)
        return state.with_calls([settle.settled(call, CallState.EXPIRED, result, now)])
    note = f"No client ran {call.tool_name} in time; {call.fallback_tool_name} took its place."
    # The approval of the front-end tool, if there was one, is not one of this tool.
    replaced = replace(
        call,
        tool_name=call.fallback_tool_name,
        proposed_tool_name=call.name_for_model,
        approval=None,
        offer=None,
    )
    call = proposals.judged(replaced, fact.verdict, state.run.options, now)
    notes = {**state.loop.notes, call.call_id: f"{note} {fact.verdict.note}".strip()}
    return replace(state.with_calls([call]), loop=replace(state.loop, notes=notes))
