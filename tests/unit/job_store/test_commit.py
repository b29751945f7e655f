"""A step of a run: fenced, idempotent, all or nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from pawl.errors import IllegalTransition, InboxChanged, InvalidField, LeaseLost, RunEnded, RunNotFound
from pawl.job_store.domain.commit import NewMessage
from pawl.job_store.domain.events import OwnerEvent
from pawl.job_store.domain.states import CallState, LeaseAction, RunState
from tests.unit.job_store.world import World, change

OUTPUT = OwnerEvent(type="output.delta", body=b"text")
ROUND = OwnerEvent(type="round.started", body=b"round")


def test_a_stale_worker_changes_nothing() -> None:
    """I4."""
    world = World()
    run_id = world.begin()
    world.advance(31)
    assert world.claim(run_id, "w2") == 2
    events = len(world.unit.events.rows)
    with pytest.raises(LeaseLost):
        world.commit(run_id, 1, events=(OUTPUT,))
    assert len(world.unit.events.rows) == events
    world.commit(run_id, 2, events=(OUTPUT,))


def test_a_lease_that_ended_still_commits_until_somebody_takes_the_run() -> None:
    """The epoch fences, not the time."""
    world = World()
    run_id = world.begin()
    world.advance(100)
    world.commit(run_id, 1, events=(OUTPUT,))


@pytest.mark.parametrize("action", [LeaseAction.PARK, LeaseAction.RELEASE])
def test_a_worker_that_let_go_has_no_more_say(action: LeaseAction) -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, state=RunState.WAITING, waits=(1,), lease=action)
    with pytest.raises(LeaseLost):
        world.commit(run_id, 1, events=(OUTPUT,))


def test_a_released_worker_has_no_more_say() -> None:
    world = World()
    run_id = world.begin()
    world.release(run_id)
    with pytest.raises(LeaseLost):
        world.commit(run_id, 1, events=(OUTPUT,))


def test_the_last_step_again_gets_the_same_answer_and_changes_nothing() -> None:
    """I2: a lost answer can be asked for again, also after the run was parked or taken over."""
    world = World()
    run_id = world.begin()
    first = world.commit(run_id, 1, commit_id="step", events=(OUTPUT, OUTPUT), lease=LeaseAction.RELEASE)
    assert (first.first_seq, first.last_seq) == (4, 5)
    world.claim(run_id, "w2")
    assert world.commit(run_id, 1, commit_id="step", events=(OUTPUT, OUTPUT)) == first
    assert world.run(run_id).last_seq == 5


def test_a_copy_of_a_step_that_arrives_after_a_later_step_changes_nothing() -> None:
    """I2, I4: the request of a caller that gave up waiting may be carried out by a replica that hung."""
    world = World()
    run_id = world.begin()
    world.commit(run_id, commit_id="step_1", events=(OUTPUT,))
    world.commit(run_id, commit_id="step_2", events=(OUTPUT,))
    before = world.run(run_id)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, commit_id="step_1", events=(OUTPUT,))
    assert world.run(run_id) == before


def test_a_step_that_counts_on_where_the_log_ends_is_planned_again_when_it_has_grown() -> None:
    """EVT-1: a message names the seqs of its output, also of that in the same step."""
    world = World()
    run_id = world.begin()
    seq = world.run(run_id).last_seq
    with pytest.raises(InboxChanged):
        world.commit(run_id, events=(OUTPUT,), after_seq=seq - 1)
    assert world.run(run_id).last_seq == seq
    world.commit(run_id, events=(OUTPUT,), after_seq=seq)


def test_the_end_again_gets_the_same_answer() -> None:
    world = World()
    run_id = world.begin()
    end = world.commit(run_id, commit_id="end", state=RunState.COMPLETED)
    assert world.commit(run_id, commit_id="end", state=RunState.COMPLETED) == end
    with pytest.raises(RunEnded):
        world.commit(run_id, commit_id="more", events=(OUTPUT,))


def test_an_unknown_run_is_not_found() -> None:
    with pytest.raises(RunNotFound):
        World().commit("run_none", 1)


def test_a_step_without_events_has_no_first_seq() -> None:
    world = World()
    run_id = world.begin()
    assert (world.commit(run_id).first_seq, world.commit(run_id).last_seq) == (0, 3)


def test_a_step_is_all_or_nothing() -> None:
    world = World()
    run_id = world.begin()
    before = world.run(run_id)
    with pytest.raises(IllegalTransition):
        world.commit(
            run_id,
            events=(OUTPUT,),
            messages=(NewMessage(message_id="", summarised_to=0, body=b"m"),),
            calls=(change("good", CallState.PROPOSED), change("bad", CallState.SUCCEEDED)),
        )
    assert world.run(run_id) is before
    assert world.event_types(run_id) == ["run.queued", "message.added", "run.running"]
    assert [message.number for message in world.unit.messages.rows] == [1]


def test_events_of_a_step_come_in_order_with_the_change_of_the_run_last() -> None:
    world = World()
    run_id = world.begin()
    world.commit(
        run_id,
        state=RunState.WAITING,
        waits=(1,),
        calls=(change("call", CallState.OFFERED),),
        messages=(NewMessage(message_id="", summarised_to=0, body=b"m"),),
        events=(OUTPUT,),
    )
    assert world.event_types(run_id)[3:] == ["output.delta", "message.added", "tool.offered", "run.waiting"]


def test_parking_sets_the_time_at_which_the_run_goes_on() -> None:
    world = World()
    run_id = world.begin()
    later = world.now + timedelta(seconds=60)
    world.commit(run_id, state=RunState.WAITING, waits=(2,), lease=LeaseAction.PARK, wake_time=later)
    assert world.claim(run_id) is None
    world.advance(60)
    assert world.claim(run_id) == 2


def test_parking_with_an_unread_command_is_over_at_once() -> None:
    """A command that came between the owner's last look and its step must not sleep with the run."""
    world = World()
    run_id = world.begin()
    world.steer(run_id)
    step = world.commit(run_id, state=RunState.WAITING, waits=(1,), lease=LeaseAction.PARK)
    assert step.commands_pending
    assert world.claim(run_id) == 2


def test_a_run_is_parked_again_by_an_owner_who_has_not_heard_of_its_stop() -> None:
    """It waits on as far as the owner knows: the step says nothing of the state."""
    world = World()
    run_id = world.begin()
    world.commit(run_id, state=RunState.WAITING, waits=(1,))
    world.cancel(run_id)
    assert world.commit(run_id, lease=LeaseAction.PARK).commands_pending
    assert world.run(run_id).state is RunState.CANCELLING
    assert world.claim(run_id) == 2


def test_a_command_to_a_parked_run_makes_it_claimable() -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, state=RunState.WAITING, waits=(1,), lease=LeaseAction.PARK)
    assert world.claim(run_id) is None
    world.steer(run_id)
    assert world.claim(run_id) == 2


def test_an_acknowledged_message_is_not_lost_in_the_end_of_the_run() -> None:
    """I1: the owner takes it into account first."""
    world = World()
    run_id = world.begin()
    world.steer(run_id)
    command = world.unit.inbox(world.run(run_id))[0]
    with pytest.raises(InboxChanged):
        world.commit(run_id, state=RunState.COMPLETED)
    world.commit(run_id, state=RunState.COMPLETED, consumed=(command.command_id,))


def test_the_end_closes_the_inbox() -> None:
    world = World()
    run_id = world.begin()
    world.cancel(run_id)
    world.commit(run_id, state=RunState.CANCELLED)
    assert world.unit.inbox(world.run(run_id)) == []


def test_a_command_is_consumed_once() -> None:
    world = World()
    run_id = world.begin()
    world.steer(run_id)
    command = world.unit.inbox(world.run(run_id))[0]
    world.commit(run_id, consumed=(command.command_id,))
    with pytest.raises(InboxChanged):
        world.commit(run_id, consumed=(command.command_id,))
    with pytest.raises(InboxChanged):
        world.commit(run_id, consumed=("never_sent",))


@pytest.mark.parametrize(
    "step",
    [
        {"calls": (change("new", CallState.PROPOSED),)},
        {"calls": (change("call", CallState.RUNNING),)},
        {"events": (ROUND,)},
        {"state": RunState.COMPLETED},
        {"state": RunState.WAITING, "waits": (1,)},
        {"state": RunState.RUNNING},
    ],
)
def test_after_an_acknowledged_cancel_nothing_new_starts(step: dict[str, Any]) -> None:
    """I12: an owner that does not know is told to look, one that knows is refused."""
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE),))
    world.cancel(run_id)
    cancel = world.unit.inbox(world.run(run_id))[0]
    with pytest.raises(InboxChanged):
        world.commit(run_id, **step)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, consumed=(cancel.command_id,), **step)
    world.commit(run_id, events=(OUTPUT,))
    world.commit(run_id, calls=(change("call", CallState.CANCELLED),), consumed=(cancel.command_id,))
    world.commit(run_id, state=RunState.CANCELLED)
    assert world.event_types(run_id)[-1] == "run.cancelled"


def test_a_waiting_run_says_for_what_and_tells_when_that_changes() -> None:
    world = World()
    run_id = world.begin()
    with pytest.raises(InvalidField):
        world.commit(run_id, state=RunState.WAITING)
    world.commit(run_id, state=RunState.WAITING, waits=(1, 2))
    world.commit(run_id, state=RunState.WAITING, waits=(1, 2))
    world.commit(run_id, state=RunState.WAITING, waits=(2,))
    assert world.event_types(run_id)[3:] == ["run.waiting", "run.waiting"]
    world.commit(run_id, state=RunState.RUNNING)
    assert world.run(run_id).waits == ()


def test_ends_say_why() -> None:
    world = World()
    run_id = world.begin()
    with pytest.raises(InvalidField):
        world.commit(run_id, state=RunState.FAILED)
    with pytest.raises(InvalidField):
        world.commit(run_id, state=RunState.CANCELLED)


def test_a_settled_call_has_a_result_and_no_other_has() -> None:
    world = World()
    run_id = world.begin()
    with pytest.raises(InvalidField):
        world.commit(run_id, calls=(change("call", CallState.FAILED, result=None),))
    with pytest.raises(InvalidField):
        world.commit(run_id, calls=(change("call", CallState.RUNNING, result=b"early"),))


def test_running_again_needs_a_higher_attempt() -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.RUNNING, attempt=1),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNING, attempt=1),))
    world.commit(run_id, calls=(change("call", CallState.RUNNING, attempt=2),))


def test_a_call_of_another_run_is_out_of_reach() -> None:
    world = World()
    first = world.begin()
    world.commit(first, calls=(change("call", CallState.RUNNABLE),))
    second = world.submit(conversation_id="other").run.run_id
    world.claim(second)
    with pytest.raises(InvalidField):
        world.commit(second, calls=(change("call", CallState.RUNNING),))
