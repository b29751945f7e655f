"""Applies facts to the state.

If a call is completed externally, the run waits until it is notified or a timeout passes. It then gets the result from
the registry by starting the call again with the same id. Until then, the call stays RUNNING.
"""

from __future__ import annotations

from typing import Final, assert_never

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import answering, job_program, programs, proposals, settle
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import (
    AgentRead,
    CallChecked,
    CallExecuted,
    CallsRead,
    CallStopped,
    Fact,
    FallbackChecked,
    ModelAnswered,
    ModelCut,
    ModelFailed,
    OwnerEvent,
    ProgramRead,
    RunRefused,
    ToolProgress,
    ToolsPinned,
    Warned,
)
from pawl.agent_loop.loop.rules.run import UnknownOutcomePolicy
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import TOOLS_MAX
from pawl.chassis.ids import CallId
from pawl.values import REPEATABLE, Answer, CallState, ExecutionContext, Outcome, Question, RunState


def ask(state: State, call: Call, question: Question, now: float) -> State:
    seconds = state.run.options.limits.seconds_of_question(question.timeout_seconds)
    waiting = replace(call, state=CallState.ASKED, question=question, deadline_time=now + seconds)
    return state.with_calls([waiting])


def answered(state: State, call: Call, answer: str | None) -> State:
    """Make the call runnable again with `answer`. None means that there is no answer."""
    asked_last = call.question.question if call.question else ""
    given = Answer(question=asked_last, answer=answer or "", declined=answer is None)
    answers = {**state.loop.answers, call.call_id: (*state.loop.answers.get(call.call_id, ()), given)}
    continues = replace(call, state=CallState.RUNNABLE, question=None, deadline_time=None)
    return replace(state.with_calls([continues]), loop=replace(state.loop, answers=answers))


# The registry decides by its own clock when the time has expired.
_SECONDS_MIN: Final = 1.0
_AT_ONCE: Final = 0.0


def awaits(state: State, call: Call, now: float) -> bool:
    until = state.loop.completions.get(call.call_id, _AT_ONCE)
    return call.state is CallState.RUNNING and until > max(now, _AT_ONCE)


def times(state: State, now: float) -> list[float]:
    """Return when to ask the registry again about calls that are completed externally."""
    return [state.loop.completions[call.call_id] for call in state.open_calls if awaits(state, call, now)]


def wait_for_completion(state: State, call: Call, seconds_left: float, now: float) -> State:
    """Record that the call is waiting for its completion. If it is already complete, request its result immediately."""
    if call.state is not CallState.RUNNING:
        return state
    known = {each: time for each, time in state.loop.completions.items() if each != call.call_id}
    if state.loop.completions.get(call.call_id) != _AT_ONCE:
        known[call.call_id] = now + max(_SECONDS_MIN, seconds_left)
    return replace(state, loop=replace(state.loop, completions=known))


def completed(state: State, call_id: CallId) -> State:
    call = state.calls.get(call_id)
    if call is None or call.state is not CallState.RUNNING:
        return state
    return replace(state, loop=replace(state.loop, completions={**state.loop.completions, call_id: _AT_ONCE}))


def ended(state: State, call_id: CallId) -> State:
    if call_id not in state.loop.completions:
        return state
    known = {each: time for each, time in state.loop.completions.items() if each != call_id}
    return replace(state, loop=replace(state.loop, completions=known))


def apply_fact(state: State, fact: Fact, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    """Apply `fact`. Return the state and the events that report the fact.

    A fact about a settled call has no effect.
    """
    match fact:
        case ToolsPinned():
            loop = replace(state.loop, cursor=fact.cursor) if fact.cursor is not None else state.loop
            run = replace(state.run, tools=fact.tools)
            return replace(state, run=run, loop=loop, tools_pinned=True), _left_out(fact)
        case ProgramRead():
            state = replace(state, graph=fact.graph)
            if fact.tools is None:
                return state, ()
            return replace(state, run=replace(state.run, tools=fact.tools), tools_pinned=True), ()
        case RunRefused():
            return replace(state, loop=replace(state.loop, failure=fact.failure)), ()
        case ModelAnswered():
            return answering.answered(state, fact, now)
        case ModelFailed():
            return answering.failed(state, fact, now)
        case ModelCut():
            return answering.cut(state, fact), ()
        case CallExecuted():
            return _executed(state, fact, now), ()
        case CallStopped():
            return _stopped(state, fact, now)
        case FallbackChecked():
            return _fallen_back(state, fact, now), ()
        case AgentRead():
            return replace(state, agents={**state.agents, fact.call_id: fact}), ()
        case CallsRead():
            named = {**state.named, **{call.call_id: call for call in fact.calls}}
            read = state.named_runs | {fact.run_id} if fact.run_id else state.named_runs
            return replace(state, named=named, named_runs=read), ()
        case CallChecked():
            return _checked(state, fact, now), ()
        case ToolProgress():
            return job_program.progressed(state, fact, now), ()
        case _:
            assert_never(fact)


def _left_out(fact: ToolsPinned) -> tuple[OwnerEvent, ...]:
    if not fact.left_out:
        return ()
    count = f"{fact.left_out} tools were left out: a run has at most {TOOLS_MAX}"
    message = f"{count}. Specify the tools that it needs with `tool_names` in its options or `pawl run --tools`."
    return (Warned(reason="TOOLS_LEFT_OUT", message=message),)


def _executed(state: State, fact: CallExecuted, now: float) -> State:
    call = state.calls[fact.call_id]
    if fact.ended.outcome is Outcome.INPUT_REQUIRED:
        is_running = call.state is CallState.RUNNING and state.run.state is not RunState.CANCELLING
        question = fact.ended.question or Question(question="What is the answer?")
        return ask(state, call, question, now) if is_running else state
    if fact.ended.outcome is Outcome.AWAITING_COMPLETION:
        return wait_for_completion(state, call, fact.ended.completion_seconds_left, now)
    policy = state.run.options.unknown_outcome_policy
    if (
        fact.ended.outcome is Outcome.UNKNOWN
        and policy is UnknownOutcomePolicy.NEEDS_ATTENTION
        and call.effect_class not in REPEATABLE
        and call.state is CallState.RUNNING
    ):
        doubted = (*state.loop.in_doubt, call.call_id)
        return replace(state, loop=replace(state.loop, in_doubt=doubted))
    state = ended(state, call.call_id)
    if call.settled:
        return state
    return state.with_calls([settle.executed(call, fact.ended, now, state.loop.notes.get(call.call_id, ""))])


def _stopped(state: State, fact: CallStopped, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    call = state.calls[fact.call_id]
    if call.settled:
        return state, ()
    state = ended(state, call.call_id)
    call = settle.stopped(call, fact.answer, now, state.loop.notes.get(call.call_id, ""))
    state = state.with_calls([call])
    if call.result is None or call.result.error_reason != settle.NOT_STOPPED:
        return state, ()
    run = replace(state.run, unstopped_call_ids=(*state.run.unstopped_call_ids, call.call_id))
    warned = Warned(
        reason=settle.NOT_STOPPED, message=f"{call.tool_name} could not be stopped and may still be running."
    )
    return replace(state, run=run), (warned,)


def _checked(state: State, fact: CallChecked, now: float) -> State:
    """Apply the verdict on a proposed call. Ignore it if the run is stopping or no longer proposes the call."""
    is_stopped = state.run.state is RunState.CANCELLING or state.loop.failure is not None
    if is_stopped or not programs.of(state.run).proposes(state, fact.call.call_id, now):
        return state
    call = proposals.apply_verdict(fact.call, fact.verdict, state.run.options, now, state.run.series)
    if call.state is CallState.AWAITING_APPROVAL and state.run.grant is not None:
        # If the series needs another approval, the earlier grant ends.
        state = replace(state, run=replace(state.run, grant=replace(state.run.grant, ended=True)))
    state = with_round(state, call.round)
    notes = {**state.loop.notes, call.call_id: fact.verdict.note} if fact.verdict.note else state.loop.notes
    run = replace(state.run, state=RunState.RUNNING, waits=())
    return replace(state, run=run, loop=replace(state.loop, notes=notes)).with_calls([call])


def with_round(state: State, number: int) -> State:
    """Return the state in round `number`, unless it has already reached that round."""
    if number <= state.run.round:
        return state
    loop, opened = state.loop, {call.call_id for call in state.open_calls}
    loop = replace(
        loop,
        notes={call_id: note for call_id, note in loop.notes.items() if call_id in opened},
        unknowns_resolved={call_id: n for call_id, n in loop.unknowns_resolved.items() if call_id in opened},
        answers={call_id: given for call_id, given in loop.answers.items() if call_id in opened},
        in_doubt=tuple(call_id for call_id in loop.in_doubt if call_id in opened),
        round_began_active_seconds=state.active_seconds,
    )
    return replace(state, run=replace(state.run, round=number), loop=loop)


def _fallen_back(state: State, fact: FallbackChecked, now: float) -> State:
    call = state.calls[fact.call_id]
    if call.state is not CallState.OFFERED:
        return state
    if fact.verdict.context in {ExecutionContext.FRONTEND, ExecutionContext.AGENT}:
        message = f"No client ran this call in time, and {call.fallback_tool_name} cannot replace it."
        result = settle.error("EXPIRED", message)
        return state.with_calls([settle.settled(call, CallState.EXPIRED, result, now)])
    note = f"No client ran {call.tool_name} in time, so {call.fallback_tool_name} replaced it."
    # An approval of the front-end tool does not cover this tool.
    replaced = replace(
        call,
        tool_name=call.fallback_tool_name,
        proposed_tool_name=call.name_for_model,
        approval=None,
        offer=None,
    )
    call = proposals.apply_verdict(replaced, fact.verdict, state.run.options, now)
    notes = {**state.loop.notes, call.call_id: f"{note} {fact.verdict.note}".strip()}
    return replace(state.with_calls([call]), loop=replace(state.loop, notes=notes))
