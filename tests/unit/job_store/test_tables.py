"""Every pair of run states and of call states, tried with the operations that may cause the transition."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CallKey
from pawl.errors import IllegalTransition, InboxChanged, InvalidField, RunEnded
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rules import call_table, run_table
from pawl.job_store.ledger.rules.calls import WITH_CHILD
from pawl.job_store.ledger.rules.delegation import Delegation
from pawl.values import CallState, CommandOutcome, DecisionKind, LeaseAction, MessagePolicy, RunState, StopCause
from tests.tables import for_each
from tests.unit.job_store.world import STORE, World, change, delegation

RUN_MOVES = {
    "QUEUED": "RUNNING WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED",
    "RUNNING": "WAITING NEEDS_ATTENTION CANCELLING COMPLETED FAILED EXPIRED CANCELLED",
    "WAITING": "RUNNING NEEDS_ATTENTION CANCELLING FAILED EXPIRED CANCELLED",
    "NEEDS_ATTENTION": "QUEUED RUNNING WAITING CANCELLING FAILED CANCELLED",
    "CANCELLING": "NEEDS_ATTENTION CANCELLED FAILED",
}
CALL_MOVES = {
    "PROPOSED": "AWAITING_APPROVAL OFFERED ASKED RUNNABLE RUNNING DELEGATED FAILED REJECTED CANCELLED DETACHED",
    "AWAITING_APPROVAL": "AWAITING_APPROVAL RUNNABLE RUNNING OFFERED REJECTED EXPIRED CANCELLED SUCCEEDED FAILED"
    " DELEGATED",
    "OFFERED": "SUCCEEDED FAILED EXPIRED CANCELLED RUNNABLE RUNNING ASKED AWAITING_APPROVAL",
    "ASKED": "RUNNABLE RUNNING SUCCEEDED FAILED REJECTED EXPIRED CANCELLED OUTCOME_UNKNOWN",
    "RUNNABLE": "RUNNING DELEGATED SUCCEEDED FAILED CANCELLED OUTCOME_UNKNOWN",
    "RUNNING": "ASKED RUNNING RUNNABLE SUCCEEDED FAILED EXPIRED CANCELLED OUTCOME_UNKNOWN",
    "DELEGATED": "SUCCEEDED FAILED CANCELLED",
}


def test_transition_tables_match_the_specification() -> None:
    """I16: the specification is a second copy of the tables, so that a mistake is found."""
    for table, specified in ((run_table.TRANSITIONS, RUN_MOVES), (call_table.TRANSITIONS, CALL_MOVES)):
        found = {state.name: {after.name for after in moves} for state, moves in table.items() if moves}
        assert found == {state: set(moves.split()) for state, moves in specified.items()}


# Only the ledger moves runs to these: it takes the run from its workers.
_NOT_BY_STEPS = (RunState.CANCELLING, RunState.NEEDS_ATTENTION)


def test_a_step_moves_a_run_only_as_the_transition_table_allows() -> None:
    """I16, EVT-4: a forbidden transition changes nothing."""
    for before, after in itertools.product(RunState, RunState):
        _move_run(World(), before, after)


def _move_run(world: World, before: RunState, after: RunState) -> None:
    run_id = world.start_run()
    world.unit.put_run(replace(world.run(run_id), state=before, waits=(1,) if before is RunState.WAITING else ()))
    untouched, events = world.run(run_id), len(world.unit.events.rows)
    moves = after in run_table.TRANSITIONS[before] and (before, after) != _NOT_BY_STEPS
    stays = after is before and not before.is_terminal
    refusal = RunEnded if before.is_terminal else IllegalTransition
    waits = (1,) if after is RunState.WAITING else ()
    with nullcontext() if moves or stays else pytest.raises(refusal):
        world.commit(run_id, state=after, waits=waits, failure=b"why", stop_cause=StopCause.USER)
    assert world.run(run_id).state is (after if moves else before)
    assert (world.run(run_id) is untouched) == (not moves and not stays)
    assert len(world.unit.events.rows) == events + moves


def test_a_step_moves_a_call_only_as_the_transition_table_allows() -> None:
    """I16: the test covers ungated calls; gated calls have their own tests."""
    for before, after in itertools.product(CallState, CallState):
        _move_call(World(), before, after)


def _move_call(world: World, before: CallState, after: CallState) -> None:
    run_id = world.start_run()
    world.commit(run_id, calls=(change("call", CallState.PROPOSED),))
    # An answer or a client's result is accepted only through a command that settles the call.
    again = before is after is CallState.AWAITING_APPROVAL
    # The same holds for the end of a child run; before that, its call can only be cancelled.
    pending = (before in call_table.PENDING and not again) or before is CallState.DELEGATED
    child = "run_child" if after is CallState.DETACHED or CallState.DELEGATED in {before, after} else ""
    was: dict[str, Any] = {"state": before, "reserved_by": "cmd" if pending else ""}
    if before is CallState.DELEGATED:
        was["child_run_id"] = child
    if (before, after) in call_table.NEEDS_START:
        was["start_time"] = world.call("call").create_time
    world.unit.put_call(replace(world.call("call"), **was))
    if pending:
        world.steer(run_id)
        command = world.unit.inbox(world.run(run_id))[0]
        world.unit.put_command(replace(command, command_id="cmd", name="tool_result", call_id="call"))
    untouched = world.call("call")
    digest = "ab" * 32 if after is CallState.AWAITING_APPROVAL else ""
    step = change("call", after, attempt=2, digest=digest, child_run_id=child)
    if again:
        # The same request after its escalation.
        world.unit.put_call(replace(world.call("call"), digest="ab" * 32))
        step = replace(step, escalated=True)
    consumed = ("cmd",) if pending else ()
    created = _delegations_of(after, child)
    if after in call_table.TRANSITIONS[before]:
        world.commit(run_id, calls=(step,), consumed=consumed, delegations=created)
        assert world.call("call").state is after
        assert world.event_types(run_id)[-1] == call_table.EVENT_TYPES[after]
        return
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(step,), consumed=consumed)
    assert world.call("call") is untouched


def _delegations_of(state: CallState, child: str) -> tuple[Delegation, ...]:
    return (replace(delegation("call", child), is_job=state is CallState.DETACHED),) if state in WITH_CHILD else ()


@for_each("state", CallState)
def test_a_new_call_is_proposed_or_in_a_state_that_follows_proposed(state: Any) -> None:
    world = World()
    run_id = world.start_run()
    created = _delegations_of(state, "run_child")
    digest = "ab" * 32 if state is CallState.AWAITING_APPROVAL else ""
    new = change("call", state, digest=digest, child_run_id="run_child" if created else "")
    may_be = state is CallState.PROPOSED or state.name in CALL_MOVES["PROPOSED"].split()
    with nullcontext() if may_be else pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(new,), delegations=created)
    found = world.unit.calls.get(CallKey(STORE, CallId("call")))
    assert (found and found.state) == (state if may_be else None)


def test_a_run_cannot_end_with_an_open_call(world: World, run_id: str) -> None:
    """I6: every call has its result before its run ends."""
    world.commit(run_id, calls=(change("call", CallState.PROPOSED),))
    for state in [state for state in CallState if not state.is_terminal]:
        for reserved_by, refusal in (("", IllegalTransition), ("cmd", InboxChanged)):
            world.unit.put_call(replace(world.call("call"), state=state, reserved_by=reserved_by))
            with pytest.raises(refusal):
                world.commit(run_id, state=RunState.COMPLETED)


@for_each("state", [state for state in RunState if not state.is_terminal])
def test_only_a_run_that_waits_for_a_user_may_sleep_indefinitely(state: Any) -> None:
    """I3: any other run needs a wake_time at which it continues."""
    world = World()
    run_id = world.start_run()
    world.unit.put_run(replace(world.run(run_id), state=state, waits=(1,)))
    may_sleep = state in {RunState.WAITING, RunState.NEEDS_ATTENTION}
    with nullcontext() if may_sleep else pytest.raises(InvalidField, match="must have a wake_time"):
        world.commit(run_id, lease=LeaseAction.PARK)
    assert (world.run(run_id).claim_at is None) == may_sleep


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (RunState, run_pb2.RunState, "RUN_STATE_"),
        (CallState, call_pb2.CallState, "CALL_STATE_"),
        (StopCause, run_pb2.StopCause, "STOP_CAUSE_"),
        (DecisionKind, call_pb2.DecisionKind, "DECISION_KIND_"),
        (MessagePolicy, ledger_pb2.MessagePolicy, "MESSAGE_POLICY_"),
        (LeaseAction, ledger_pb2.LeaseAction, "LEASE_ACTION_"),
        (CommandOutcome, ledger_pb2.CommandOutcome, "COMMAND_OUTCOME_"),
    ],
)
def test_enum_numbers_match_the_contract(ours: type, theirs: object, prefix: str) -> None:
    contract = {name.removeprefix(prefix): number for name, number in theirs.items() if number}  # type: ignore[attr-defined]
    assert {member.name: member.value for member in ours} == contract  # type: ignore[attr-defined]
