"""One active run per conversation, and how messages queue behind it (LOOP-13)."""

from __future__ import annotations

import pytest

from pawl.errors import QueueFull, RequestIdReused
from pawl.values import MessagePolicy, RunState, StopCause
from tests.unit.job_store.world import World


def test_a_second_message_enters_the_conversation_only_when_its_turn_starts(world: World) -> None:
    """A message sent during a run must not enter the middle of that run's history."""
    first = world.start_run()
    second = world.submit().run
    assert (second.state, second.claim_at) == (RunState.QUEUED, None)
    assert world.event_types(second.run_id) == ["run.queued"]
    assert [message.number for message in world.unit.messages.rows] == [1]
    world.commit(first, state=RunState.COMPLETED)
    assert world.run(second.run_id).claim_at == world.now
    assert world.event_types(second.run_id) == ["run.queued", "message.added"]
    assert [message.number for message in world.unit.messages.rows] == [1, 2]


def test_two_interrupting_messages_both_enter_in_order(
    world: World,
) -> None:
    """This holds however close together they arrive, as if the first had run before the second."""
    active = world.start_run()
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


def test_messages_to_a_superseded_run_are_kept(world: World) -> None:
    """I1: its worker puts the message into the conversation before the next run starts."""
    active = world.start_run()
    first = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.steer(first)
    second = world.submit(MessagePolicy.INTERRUPT).run.run_id
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(first).state is RunState.CANCELLING
    assert world.run(second).claim_at is None
    assert world.claim(first) == 1
    world.commit(first, state=RunState.CANCELLED, consumed=world.unread(first))
    assert world.run(second).claim_at == world.now


def test_the_queue_is_bounded(world: World) -> None:
    world.submit()
    for _ in range(3):
        world.submit(queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(queue_max=3)


def test_a_run_that_ends_in_the_same_group_frees_its_queue_slot(world: World) -> None:
    """LOOP-14: each operation of a group updates the counts read at its start."""
    idle = world.submit(store_queue_max=1).run.run_id
    with pytest.raises(QueueFull):
        world.submit(conversation_id="other", store_queue_max=1)
    world.cancel(idle)
    world.submit(conversation_id="other", store_queue_max=1)
    with pytest.raises(QueueFull):
        world.submit(store_queue_max=1)


def test_submitting_is_idempotent_and_reusing_an_id_is_refused(world: World) -> None:
    """I2, LOOP-1: the message is stored once, even if it steers a run."""
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
