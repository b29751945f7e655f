"""Commands that are read together, and steps that depend on where the log ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pawl.agent_loop.domain import planning, step
from pawl.agent_loop.domain.call import CallResult, CallState, DecisionKind
from pawl.agent_loop.domain.command import (
    CallResolution,
    Cancel,
    Command,
    CommandKind,
    Decide,
    Resolve,
    Steer,
    ToolResult,
)
from pawl.agent_loop.domain.decision import StartModel, StopCalls
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.run import RunOptions, RunState, StopCause, UnknownOutcomePolicy
from pawl.agent_loop.domain.state import State
from pawl.chassis.ids import CommandId, RunId, UserId
from tests.unit.agent_loop.simulation import UNKNOWN, Simulation, answer


def with_commands(run: Simulation, *kinds: CommandKind) -> State:
    """What the ledger has of a run, with these commands unread."""
    commands = tuple(
        Command(command_id=CommandId(f"cmd_{number}"), user_id=UserId("u"), time=run.now, kind=kind)
        for number, kind in enumerate(kinds)
    )
    return replace(run.base, commands=commands)


@pytest.mark.parametrize(
    ("tool_name", "taken"),
    [
        ("front", lambda call_id: ToolResult(call_id=call_id, result=CallResult(content_json=b'"seen"'))),
        ("ask", lambda call_id: Decide(call_id=call_id, kind=DecisionKind.ANSWER, answer="blue")),
    ],
)
def test_what_was_taken_about_a_call_counts_though_a_message_came_before_it(
    tool_name: str, taken: Callable[[str], CommandKind]
) -> None:
    """I1: the receipt is final, also when the owner reads it together with an earlier message."""
    run = Simulation([answer(tool_name)])
    run.turn()
    run.model_answers()
    [call] = run.calls

    run.sends(Steer(text="never mind"), taken(call.call_id))

    assert run.base.calls[call.call_id].state is CallState.SUCCEEDED


def test_a_run_that_goes_on_from_quarantine_runs_before_the_model_answers() -> None:
    """EVT-1: the ledger tells first that a run runs; in the step of the answer that would move its seqs."""
    run = Simulation([answer()])
    run.turn()
    let_go_on = replace(run.base, run=replace(run.base.run, state=RunState.QUEUED), under_way=frozenset())

    plan = planning.plan(let_go_on, (), run.now)

    assert any(isinstance(work, StartModel) for work in plan.work)
    assert plan.state.run.state is RunState.RUNNING


@pytest.mark.parametrize(("last_output_seq", "after_seq"), [(7, None), (8, 7)])
def test_a_step_says_where_the_log_must_end_if_its_messages_name_seqs_of_its_own_events(
    last_output_seq: int, after_seq: int | None
) -> None:
    """EVT-1: somebody else's event may come between, and the step is then planned again."""
    base = Simulation([answer()]).base
    base = replace(base, run=replace(base.run, last_seq=7))
    message = Message(
        role=Role.ASSISTANT, run_id=RunId("r"), text="hi", first_output_seq=7, last_output_seq=last_output_seq
    )

    planned = step.between(base, replace(base, messages=(*base.messages, message)), ())

    assert planned.after_seq == after_seq


def test_a_call_that_was_approved_just_before_the_stop_is_withdrawn_while_others_are_being_stopped() -> None:
    """I3, I12: a step that made it runnable would be refused for ever, and the run would never end."""
    run = Simulation([answer("parallel", "gated")])
    run.turn()
    run.model_answers()
    gated = run.calls[1]
    approve = Decide(call_id=gated.call_id, kind=DecisionKind.APPROVE)

    planned = planning.plan(with_commands(run, approve, Cancel(cause=StopCause.USER)), (), run.now)

    assert planned.state.calls[gated.call_id].state is CallState.CANCELLED
    assert planned.work == (StopCalls(call_ids=(run.calls[0].call_id,)),)


def test_a_call_that_was_to_run_again_just_before_the_stop_is_withdrawn_in_the_step_that_reads_both() -> None:
    """I3, I12: the ledger wants a command to be consumed by the step that moves its call."""
    options = RunOptions(unknown_outcome_policy=UnknownOutcomePolicy.NEEDS_ATTENTION)
    run = Simulation([answer("serial")], options)
    run.turn()
    run.model_answers()
    [call] = run.calls
    run.ends(call.call_id, UNKNOWN)
    again = Resolve(call_id=call.call_id, resolution=CallResolution.RUN_AGAIN)

    planned = planning.plan(with_commands(run, again, Cancel(cause=StopCause.USER)), (), run.now)

    assert planned.state.calls[call.call_id].state is CallState.CANCELLED
