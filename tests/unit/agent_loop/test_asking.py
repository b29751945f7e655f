"""A tool that runs asks a person something: the rules."""

from __future__ import annotations

from pawl.agent_loop.domain.call import Call, CallState, DecisionKind
from pawl.agent_loop.domain.command import Cancel, Decide
from pawl.agent_loop.domain.run import RunState, StopCause
from tests.unit.agent_loop.simulation import ASKS, Simulation, answer


def asking_call(run: Simulation) -> Call:
    """Begin a batch of one serial call whose tool asks."""
    run.turn()
    run.model_answers()
    (call,) = run.calls
    run.ends(call.call_id, ASKS)
    (call,) = run.calls
    return call


def test_a_tool_that_asks_parks_the_run_and_goes_on_with_every_answer_in_order() -> None:
    run = Simulation([answer("serial")])
    call = asking_call(run)
    assert (call.state, call.question) == (CallState.ASKED, ASKS.question)
    assert run.parked
    run.decides(call, DecisionKind.ANSWER)
    run.ends(call.call_id, ASKS)
    run.decides(call, DecisionKind.REJECT)
    answers = run.base.loop.answers[call.call_id]
    assert [(given.answer, given.declined) for given in answers] == [("yes", False), ("", True)]
    run.ends(call.call_id)
    assert run.calls[0].state is CallState.SUCCEEDED
    assert run.started == [call.call_id] * 3


def test_a_question_of_a_tool_that_nobody_answers_goes_back_to_the_tool() -> None:
    run = Simulation([answer("serial")])
    call = asking_call(run)
    run.passes(run.options.limits.answer_timeout_seconds)
    assert run.base.loop.answers[call.call_id][-1].declined
    assert call.call_id in run.under_way


def test_a_message_that_steers_declines_the_question_of_a_tool() -> None:
    run = Simulation([answer("serial")])
    call = asking_call(run)
    run.steers()
    assert run.base.loop.answers[call.call_id][-1].declined
    run.ends(call.call_id)
    assert run.calls[0].state is CallState.SUCCEEDED


def test_a_cancelled_run_stops_the_tool_that_asks_also_if_it_was_just_answered() -> None:
    for is_answered in (False, True):
        run = Simulation([answer("serial")])
        call = asking_call(run)
        cancel = Cancel(cause=StopCause.USER)
        given = Decide(call_id=call.call_id, kind=DecisionKind.ANSWER, answer="yes")
        run.sends(given, cancel) if is_answered else run.sends(cancel)
        assert run.started == [call.call_id]
        assert run.run.state is RunState.CANCELLED
        assert run.calls[0].state is CallState.CANCELLED
