"""Receipts are final, and say exactly what became of a command (FE-2, HITL-3, HITL-6, I11)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pawl.chassis.ids import CallId, ClientId, CommandId, RunId
from pawl.errors import RequestIdReused
from pawl.job_store.domain.command import Cancel, Progress, Resolve, Steer
from pawl.job_store.domain.rows import CommandKey
from pawl.job_store.domain.states import (
    CallState,
    CommandOutcome,
    DecisionKind,
    LeaseAction,
    RunState,
    StopCause,
)
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, STORE, World, change

ACCEPTED, DUPLICATE, LATE = CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE, CommandOutcome.LATE
WRONG_HOLDER, UNKNOWN, REFUSED = CommandOutcome.WRONG_HOLDER, CommandOutcome.UNKNOWN, CommandOutcome.REFUSED


def waiting(world: World, state: CallState, **fields: object) -> str:
    """A parked run whose call `call` waits for somebody."""
    run_id = world.begin()
    digest = DIGEST if state is CallState.AWAITING_APPROVAL else ""
    world.commit(
        run_id,
        calls=(change("call", state, digest=digest, **fields),),
        state=RunState.WAITING,
        waits=(1,),
        lease=LeaseAction.PARK,
    )
    return run_id


def test_a_result_is_taken_once() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    receipt = world.result(run_id, "call", command_id="first")
    assert receipt.outcome is ACCEPTED
    assert receipt.pending == ()
    assert world.result(run_id, "call", command_id="first").outcome is DUPLICATE
    second = world.result(run_id, "call", command_id="second")
    assert (second.outcome, second.reason) == (LATE, "CALL_NOT_PENDING")
    assert world.result(run_id, "call", command_id="second").outcome is LATE
    assert world.claim(run_id) == 2


def test_a_command_id_is_not_used_for_something_else() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    world.result(run_id, "call", command_id="first")
    with pytest.raises(RequestIdReused):
        world.send(run_id, Steer(), "first")


def test_only_the_client_that_holds_a_call_may_return_it() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    epoch = world.lease(run_id, "call", "tab_1").call.offer.epoch  # type: ignore[union-attr]
    assert world.result(run_id, "call", "tab_2", epoch).outcome is WRONG_HOLDER
    assert world.result(run_id, "call", "tab_1", epoch + 1).outcome is WRONG_HOLDER
    assert world.result(run_id, "call").outcome is WRONG_HOLDER
    assert world.result(run_id, "call", "tab_1", epoch).outcome is ACCEPTED


def test_a_session_that_was_replaced_brings_nothing_and_leaves_nothing() -> None:
    """The same frame is taken from the session that holds the call."""
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    world.lease(run_id, "call", "tab", "ses_1")
    world.lease(run_id, "call", "tab", "ses_2")
    before = world.run(run_id), world.call("call")
    progress = Progress(call_id=CallId("call"), client_id=ClientId("tab"), offer_epoch=1, fraction=0.5, message="")
    refused = [
        world.result(run_id, "call", "tab", 1, "frame", session_id="ses_1"),
        world.send(run_id, progress, "progress", session_id="ses_1"),
    ]
    assert {(receipt.outcome, receipt.reason) for receipt in refused} == {(WRONG_HOLDER, "CALL_NOT_PENDING")}
    assert (world.run(run_id), world.call("call")) == before
    assert world.unit.commands.get(CommandKey(STORE, RunId(run_id), CommandId("frame"))) is None
    assert world.send(run_id, progress, "progress", session_id="ses_2").outcome is ACCEPTED
    assert world.result(run_id, "call", "tab", 1, "frame", session_id="ses_2").outcome is ACCEPTED
    assert world.result(run_id, "call", "tab", 1, "frame", session_id="ses_1").outcome is DUPLICATE


def test_a_result_without_a_session_is_taken_from_any_of_the_client() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    world.lease(run_id, "call", "tab", "ses_1")
    assert world.result(run_id, "call", "tab", 1).outcome is ACCEPTED


def test_progress_is_told_at_most_so_often() -> None:
    """It renews the lease however often it comes, and what is left out leaves no trace."""
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    epoch = world.lease(run_id, "call", "tab_1").call.offer.epoch  # type: ignore[union-attr]
    progress = Progress(
        call_id=CallId("call"), client_id=ClientId("tab_1"), offer_epoch=epoch, fraction=0.5, message=""
    )
    for _ in range(1000):
        assert world.send(run_id, progress).outcome is ACCEPTED
        world.advance(0.001)
    assert 1 < world.event_types(run_id).count("tool.progress") <= 11
    assert world.run(run_id).command_count <= 11
    assert world.call("call").offer.expire_time > world.now + timedelta(seconds=29)  # type: ignore[union-attr, operator]


def test_the_unary_path_is_open_when_nobody_holds_the_call() -> None:
    """FE-3: also when the lease of a client that vanished has ended."""
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    world.lease(run_id, "call", "tab_1")
    world.advance(31)
    assert world.result(run_id, "call").outcome is ACCEPTED


def test_a_result_after_the_deadline_is_late() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED, deadline_time=world.now + timedelta(seconds=10))
    world.advance(10)
    receipt = world.result(run_id, "call")
    assert (receipt.outcome, receipt.reason) == (LATE, "DEADLINE_PASSED")


@pytest.mark.parametrize("state", [CallState.PROPOSED, CallState.RUNNABLE, CallState.RUNNING, CallState.ASKED])
def test_a_result_for_a_call_that_is_not_offered_is_refused(state: CallState) -> None:
    world = World()
    run_id = waiting(world, state)
    receipt = world.result(run_id, "call")
    assert (receipt.outcome, receipt.reason) == (REFUSED, "CALL_NOT_PENDING")


def test_what_is_not_there_is_unknown_and_leaves_no_trace() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    assert world.result(run_id, "none").reason == "CALL_NOT_FOUND"
    assert world.result("none", "call").reason == "RUN_NOT_FOUND"
    foreign = world.send(run_id, Steer(), user_id="eve")
    assert (foreign.outcome, foreign.reason, foreign.run) == (UNKNOWN, "RUN_NOT_FOUND", None)
    assert world.run(run_id).command_count == 0


def test_a_decision_applies_to_what_was_shown() -> None:
    """I9."""
    world = World()
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    assert world.decide(run_id, "call", DecisionKind.APPROVE, digest=EDITED_DIGEST).reason == "DIGEST_MISMATCH"
    assert world.decide(run_id, "call", DecisionKind.APPROVE, digest="").reason == "DIGEST_REQUIRED"
    assert world.decide(run_id, "call", DecisionKind.APPROVE).outcome is ACCEPTED


def test_a_call_is_decided_once() -> None:
    world = World()
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    world.decide(run_id, "call", DecisionKind.REJECT, "no")
    assert world.decide(run_id, "call", DecisionKind.REJECT, "no").outcome is DUPLICATE
    for _ in range(2):
        second = world.decide(run_id, "call", DecisionKind.APPROVE)
        assert (second.outcome, second.reason) == (LATE, "ALREADY_DECIDED")
        if world.call("call").state is CallState.AWAITING_APPROVAL:
            world.claim(run_id)
            world.commit(run_id, calls=(change("call", CallState.REJECTED, digest=DIGEST),), consumed=("no",))


def test_who_decides_after_the_run_has_ended_is_told_of_the_decision_before() -> None:
    world = World()
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    world.decide(run_id, "call", DecisionKind.REJECT, "no")
    world.send(run_id, Cancel(cause=StopCause.USER))
    assert world.decide(run_id, "call", DecisionKind.APPROVE).reason == "ALREADY_DECIDED"
    world.claim(run_id)
    rejected = change("call", CallState.REJECTED, digest=DIGEST)
    world.commit(run_id, state=RunState.CANCELLED, calls=(rejected,), consumed=("no",))
    assert world.decide(run_id, "call", DecisionKind.APPROVE).reason == "ALREADY_DECIDED"


def test_a_decision_after_the_deadline_is_late() -> None:
    """HITL-4: by the time of the database, whatever the owner is doing."""
    world = World()
    run_id = waiting(world, CallState.AWAITING_APPROVAL, deadline_time=world.now + timedelta(seconds=900))
    world.advance(900)
    assert world.decide(run_id, "call", DecisionKind.APPROVE).reason == "DEADLINE_PASSED"


def test_a_question_is_answered_or_refused_and_not_approved() -> None:
    """HITL-1."""
    world = World()
    run_id = waiting(world, CallState.ASKED)
    assert world.decide(run_id, "call", DecisionKind.APPROVE, digest="").outcome is REFUSED
    assert world.decide(run_id, "call", DecisionKind.ANSWER, digest="").outcome is ACCEPTED


def test_decisions_come_in_any_order_and_what_is_left_is_shown() -> None:
    """HITL-6."""
    world = World()
    run_id = world.begin()
    calls = (
        change("a", CallState.AWAITING_APPROVAL, digest=DIGEST, index=0),
        change("b", CallState.ASKED, index=1),
        change("c", CallState.OFFERED, index=2),
        change("d", CallState.RUNNABLE, index=3),
    )
    world.commit(run_id, calls=calls)
    receipt = world.result(run_id, "c")
    assert [call.call_id for call in receipt.pending] == ["a", "b"]
    receipt = world.decide(run_id, "b", DecisionKind.ANSWER, digest="")
    assert [call.call_id for call in receipt.pending] == ["a"]
    assert world.decide(run_id, "a", DecisionKind.APPROVE).pending == ()


def test_a_run_that_ended_takes_nothing_more() -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.FAILED),), state=RunState.COMPLETED)
    for receipt in (world.steer(run_id), world.cancel(run_id), world.result(run_id, "call")):
        assert (receipt.outcome, receipt.reason) == (LATE, "RUN_ENDED")
    assert world.event_types(run_id)[-1] == "run.completed"


def test_a_run_that_is_being_stopped_takes_no_decision() -> None:
    """I12: an approval must not look as if it would start something."""
    world = World()
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    receipt = world.cancel(run_id)
    assert (receipt.outcome, receipt.pending) == (ACCEPTED, ())
    assert world.decide(run_id, "call", DecisionKind.APPROVE).outcome is LATE
    assert world.steer(run_id).outcome is LATE


def test_cancelling_twice_is_as_good_as_once() -> None:
    world = World()
    run_id = world.begin()
    assert world.cancel(run_id).outcome is ACCEPTED
    assert world.cancel(run_id).outcome is ACCEPTED
    assert len(world.unit.inbox(world.run(run_id))) == 1
    assert world.event_types(run_id).count("run.cancelling") == 1


def test_cancelling_a_parked_run_lets_a_worker_settle_it() -> None:
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    world.send(run_id, Cancel(cause=StopCause.USER))
    assert world.run(run_id).state is RunState.CANCELLING
    assert world.claim(run_id) == 2


def test_a_call_in_doubt_is_resolved_once() -> None:
    world = World()
    run_id = waiting(world, CallState.RUNNING)
    assert world.send(run_id, Resolve(call_id=CallId("call"))).outcome is REFUSED
    world.steer(run_id)
    world.claim(run_id)
    world.commit(run_id, state=RunState.NEEDS_ATTENTION)
    receipt = world.send(run_id, Resolve(call_id=CallId("call")), "found")
    assert receipt.outcome is ACCEPTED
    assert world.send(run_id, Resolve(call_id=CallId("call"))).outcome is LATE
    world.commit(run_id, calls=(change("call", CallState.SUCCEEDED),), consumed=("found",))


def test_progress_is_written_at_once_and_renews_the_lease() -> None:
    """TOOL-8."""
    world = World()
    run_id = waiting(world, CallState.OFFERED)
    epoch = world.lease(run_id, "call", "tab").call.offer.epoch  # type: ignore[union-attr]
    world.advance(20)
    progress = Progress(
        call_id=CallId("call"), client_id=ClientId("tab"), offer_epoch=epoch, fraction=0.5, message="half"
    )
    assert world.send(run_id, progress).outcome is ACCEPTED
    assert world.event_types(run_id)[-1] == "tool.progress"
    assert world.call("call").offer.expire_time == world.now + timedelta(seconds=30)  # type: ignore[union-attr]
    assert world.unit.inbox(world.run(run_id)) == []
    stranger = Progress(
        call_id=CallId("call"), client_id=ClientId("other"), offer_epoch=epoch, fraction=None, message=""
    )
    assert world.send(run_id, stranger).outcome is WRONG_HOLDER
