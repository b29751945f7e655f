"""One run at a time per conversation, and what a message does meanwhile (LOOP-13)."""

from __future__ import annotations

import pytest

from pawl.chassis.ids import ConversationId
from pawl.errors import ConversationBusy, ConversationNotFound, InboxChanged, QueueFull, RequestIdReused
from pawl.job_store.domain.rows import ConversationKey
from pawl.job_store.domain.states import MessagePolicy, RunState, StopCause
from tests.unit.job_store.world import STORE, World


def numbers(world: World) -> list[int]:
    return [message.number for message in world.unit.messages.rows]


def test_a_message_starts_a_run_that_may_be_claimed_at_once() -> None:
    world = World()
    run = world.submit().run
    assert (run.state, run.claim_at, run.last_seq) == (RunState.QUEUED, world.now, 2)
    assert world.event_types(run.run_id) == ["run.queued", "message.added"]
    assert world.unit.work_ready


def test_a_second_message_waits_and_enters_the_conversation_only_at_its_turn() -> None:
    """A message that came while a run was active must not stand in the middle of that run's history."""
    world = World()
    first = world.begin()
    second = world.submit().run
    assert (second.state, second.claim_at) == (RunState.QUEUED, None)
    assert world.event_types(second.run_id) == ["run.queued"]
    assert numbers(world) == [1]
    world.commit(first, state=RunState.COMPLETED)
    assert world.run(second.run_id).claim_at == world.now
    assert world.event_types(second.run_id) == ["run.queued", "message.added"]
    assert numbers(world) == [1, 2]


def test_an_interrupting_message_stops_the_active_run_and_goes_before_those_that_wait() -> None:
    world = World()
    active = world.begin()
    waiting = world.submit().run.run_id
    urgent = world.submit(MessagePolicy.INTERRUPT).run.run_id
    assert world.run(active).state is RunState.CANCELLING
    assert world.run(active).stop_cause is StopCause.SUPERSEDED
    assert [command.name for command in world.unit.inbox(world.run(active))] == ["cancel"]
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(urgent).claim_at == world.now
    assert world.run(waiting).claim_at is None
    world.claim(urgent)
    world.commit(urgent, state=RunState.FAILED, failure=b"why")
    assert world.run(waiting).claim_at == world.now


def test_of_two_interrupting_messages_the_second_one_wins_and_both_stand_in_the_conversation_in_order() -> None:
    """However close together they come: as if the turn of the first had come before the second."""
    world = World()
    active = world.begin()
    waiting = world.submit().run.run_id
    first, second, third = (world.submit(MessagePolicy.INTERRUPT).run.run_id for _ in range(3))
    assert [world.run(run_id).state for run_id in (first, second, third)] == [RunState.QUEUED] * 3
    world.commit(active, state=RunState.CANCELLED)
    for superseded in (first, second):
        assert world.run(superseded).state is RunState.CANCELLED
        assert world.run(superseded).stop_cause is StopCause.SUPERSEDED
        assert world.event_types(superseded) == ["run.queued", "message.added", "run.cancelled"]
    assert world.run(third).claim_at == world.now
    assert [message.run_id for message in world.unit.messages.rows] == [active, first, second, third]
    world.claim(third)
    world.commit(third, state=RunState.COMPLETED)
    assert world.run(waiting).claim_at == world.now


def test_of_as_many_interrupting_messages_as_may_ever_wait_the_last_one_wins() -> None:
    world = World()
    active = world.begin()
    run_ids = [world.submit(MessagePolicy.INTERRUPT, queue_max=1000).run.run_id for _ in range(1000)]
    world.commit(active, state=RunState.CANCELLED)
    assert {world.run(run_id).state for run_id in run_ids[:-1]} == {RunState.CANCELLED}
    assert world.run(run_ids[-1]).claim_at == world.now


def test_an_interrupting_run_that_its_user_cancelled_supersedes_nothing() -> None:
    world = World()
    active = world.begin()
    waiting = world.submit().run.run_id
    first, second = (world.submit(MessagePolicy.INTERRUPT).run.run_id for _ in range(2))
    world.cancel(second)
    world.cancel(first)
    third = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(third).claim_at == world.now
    assert world.run(waiting).state is RunState.QUEUED
    world.claim(third)
    world.commit(third, state=RunState.COMPLETED)
    assert world.run(waiting).claim_at == world.now


def test_what_entered_an_interrupting_run_before_its_turn_is_kept_when_it_is_superseded() -> None:
    """I1: its owner puts it into the conversation, then the next one has its turn."""
    world = World()
    active = world.begin()
    first = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.steer(first)
    second = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(first).state is RunState.CANCELLING
    assert world.run(second).claim_at is None
    assert world.claim(first) == 1
    unread = tuple(command.command_id for command in world.unit.inbox(world.run(first)))
    world.commit(first, state=RunState.CANCELLED, consumed=unread)
    assert world.run(second).claim_at == world.now


def test_an_interrupting_message_replaces_a_run_that_nobody_has_begun() -> None:
    world = World()
    idle = world.submit().run.run_id
    urgent = world.submit(MessagePolicy.INTERRUPT).run
    assert world.run(idle).state is RunState.CANCELLED
    assert urgent.claim_at == world.now
    assert urgent.last_seq == 2


def test_a_steering_message_enters_the_active_run() -> None:
    world = World()
    active = world.begin()
    submitted = world.submit(MessagePolicy.STEER)
    assert submitted.steered
    assert submitted.run.run_id == active
    assert [command.payload for command in world.unit.inbox(world.run(active))] == [b"steer"]
    assert [wakeup.run.run_id for wakeup in world.unit.wakeups.rows] == [active]


def test_a_message_that_steered_a_run_is_kept_when_it_is_stopped_before_it_began() -> None:
    """I1: only an owner can put it into the conversation, so the run waits for one."""
    world = World()
    idle = world.submit().run.run_id
    assert world.submit(MessagePolicy.STEER).run.run_id == idle
    urgent = world.submit(MessagePolicy.INTERRUPT).run.run_id
    assert world.run(idle).state is RunState.CANCELLING
    assert world.run(urgent).claim_at is None
    assert world.claim(idle) == 1
    with pytest.raises(InboxChanged):
        world.commit(idle, state=RunState.CANCELLED)
    unread = [command.command_id for command in world.unit.inbox(world.run(idle))]
    world.commit(idle, state=RunState.CANCELLED, consumed=tuple(unread))
    assert world.run(urgent).claim_at == world.now


def test_a_steering_message_is_not_lost_in_a_run_that_is_being_stopped() -> None:
    """I1: it becomes a run of its own."""
    world = World()
    active = world.begin()
    world.cancel(active)
    submitted = world.submit(MessagePolicy.STEER)
    assert not submitted.steered
    assert submitted.run.run_id != active


def test_a_message_is_refused_while_the_conversation_is_busy_if_that_was_asked() -> None:
    world = World()
    world.submit()
    with pytest.raises(ConversationBusy):
        world.submit(MessagePolicy.REJECT)


def test_the_queue_is_bounded() -> None:
    world = World()
    world.submit()
    for _ in range(3):
        world.submit(queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(queue_max=3)


def test_a_run_that_ends_in_the_same_group_leaves_its_place_in_the_queue_of_the_store() -> None:
    """LOOP-14. What was counted when the group began is brought up to date by each of its operations."""
    world = World()
    idle = world.submit(store_queue_max=1).run.run_id
    with pytest.raises(QueueFull):
        world.submit(conversation_id="other", store_queue_max=1)
    world.cancel(idle)
    world.submit(conversation_id="other", store_queue_max=1)
    with pytest.raises(QueueFull):
        world.submit(store_queue_max=1)


def test_a_queued_run_can_be_cancelled_and_leaves_its_place() -> None:
    world = World()
    active = world.begin()
    first, second = world.submit().run.run_id, world.submit().run.run_id
    world.cancel(first)
    assert world.run(first).state is RunState.CANCELLED
    assert world.event_types(first) == ["run.queued", "run.cancelled"]
    world.commit(active, state=RunState.COMPLETED)
    assert world.run(second).claim_at == world.now


def test_a_refused_message_leaves_nothing_behind() -> None:
    world = World()
    with pytest.raises(ConversationNotFound):
        world.submit(conversation_must_exist=True)
    assert world.unit.conversations.get(ConversationKey(STORE, ConversationId("conv"))) is None
    world.submit()
    with pytest.raises(ConversationNotFound):
        world.submit(user_id="bob")


def test_the_same_request_gets_the_same_run_and_another_payload_is_refused() -> None:
    """I2, LOOP-1."""
    world = World()
    run = world.submit(request_id="r1").run
    world.claim(run.run_id)
    again = world.submit(request_id="r1")
    assert again.run == world.run(run.run_id)
    assert len(world.unit.messages.rows) == 1
    with pytest.raises(RequestIdReused):
        world.submit(request_id="r1", fingerprint=b"other")
    steered = world.submit(MessagePolicy.STEER, request_id="r2")
    assert world.submit(MessagePolicy.STEER, request_id="r2").steered
    assert len(world.unit.inbox(world.run(steered.run.run_id))) == 1
