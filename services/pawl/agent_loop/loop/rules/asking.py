"""A running tool asks a person something: the call waits as a question does, and goes on with what became of it."""

from __future__ import annotations

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.state import State
from pawl.values import Answer, CallState, Question


def asked(state: State, call: Call, question: Question, now: float) -> State:
    """Return the state with the call waiting for a person."""
    seconds = state.run.options.limits.seconds_of_question(question.timeout_seconds)
    waiting = replace(call, state=CallState.ASKED, question=question, deadline_time=now + seconds)
    return state.with_calls([waiting])


def answered(state: State, call: Call, answer: str | None) -> State:
    """Return the state with the call to be run again with the answer, or with the news that nobody answers."""
    asked_last = call.question.question if call.question else ""
    given = Answer(question=asked_last, answer=answer or "", declined=answer is None)
    answers = {**state.loop.answers, call.call_id: (*state.loop.answers.get(call.call_id, ()), given)}
    goes_on = replace(call, state=CallState.RUNNABLE, question=None, deadline_time=None)
    return replace(state.with_calls([goes_on]), loop=replace(state.loop, answers=answers))
