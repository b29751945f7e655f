"""Conversations that are shared for writing: others begin runs of their own, and touch no run of anybody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, UserId
from pawl.errors import ConversationNotFound, QueueFull
from pawl.job_store.domain.conversations import UpdateConversation
from pawl.job_store.domain.rows import ConversationKey, ConversationRow
from pawl.job_store.domain.states import RunState, Sharing, StopCause
from tests.unit.job_store.world import STORE, USER, World

BOB = UserId("bob")
KEY = ConversationKey(STORE, ConversationId("conv"))


def share(world: World, sharing: Sharing, user_id: UserId = USER) -> ConversationRow:
    row: ConversationRow = world.apply(
        UpdateConversation(
            store_id=STORE,
            user_id=user_id,
            request_id=RequestId(""),
            fingerprint=b"",
            conversation_id=KEY.conversation_id,
            sharing=sharing,
            cancel=b"cancel",
        )
    )
    return row


def conversation(world: World) -> ConversationRow:
    row = world.unit.conversations.get(KEY)
    assert row is not None
    return row


def shared() -> tuple[World, str]:
    """A conversation of ann that is shared for writing, with a run of hers."""
    world = World()
    run_id = world.begin()
    share(world, Sharing.WRITE)
    return world, run_id


def test_the_key_of_its_user_leads_nobody_else_to_it(world: World) -> None:
    mine = world.submit(conversation_id="", key_hash=b"k").run
    key = ConversationId(mine.conversation_id)
    row = world.unit.conversations.get(ConversationKey(STORE, key))
    assert row is not None
    world.unit.put_conversation(replace(row, sharing=Sharing.WRITE))
    assert world.submit(user_id=BOB, conversation_id="", key_hash=b"k").run.conversation_id != key


def test_writers_leave_half_of_the_queue_to_its_user() -> None:
    world, _ = shared()
    for _ in range(2):
        world.submit(user_id=BOB, queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(user_id=BOB, queue_max=3)
    world.submit(queue_max=3)


def test_a_writer_leaves_the_archive_as_it_is() -> None:
    world, _ = shared()
    row = conversation(world)
    world.unit.put_conversation(replace(row, archived=True))
    world.submit(user_id=BOB)
    assert conversation(world).archived
    world.submit()
    assert not conversation(world).archived


def test_writers_undo_their_own_runs_of_it_whatever_is_shared() -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    theirs = world.begin(user_id=BOB)
    world.commit(theirs, state=RunState.COMPLETED)
    share(world, Sharing.READ)
    assert world.submit(user_id=BOB, undoes=theirs).run.user_id == BOB
    elsewhere = world.begin(user_id=BOB, conversation_id="other")
    row = conversation(world)
    for undone, user_id in ((first, BOB), (theirs, UserId("eve")), ("absent", BOB), (elsewhere, BOB)):
        with pytest.raises(ConversationNotFound):
            world.submit(user_id=user_id, undoes=undone)
    world.unit.put_conversation(replace(row, user_id=UserId(""), erase_user_id=USER))
    with pytest.raises(ConversationNotFound):
        world.submit(user_id=BOB, undoes=theirs)


def test_runs_of_writers_are_stopped_when_it_is_not_shared_for_writing_any_more() -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    active, waiting = (world.submit(user_id=BOB).run.run_id for _ in range(2))
    world.claim(active)
    world.commit(active, state=RunState.RUNNING)
    mine = world.submit().run.run_id
    changed = share(world, Sharing.READ)
    assert (changed.sharing, changed.queue, changed.active_run_id) == (Sharing.READ, (mine,), active)
    assert (world.run(waiting).state, world.run(waiting).stop_cause) == (RunState.CANCELLED, StopCause.USER)
    assert world.run(active).state is RunState.CANCELLING
    assert [(each.name, each.user_id, each.payload) for each in world.unit.inbox(world.run(active))] == [
        ("cancel", USER, b"cancel")
    ]
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(mine).claim_at == world.now


def test_the_run_of_a_writer_makes_no_title() -> None:
    world, first = shared()
    world.claim(first)
    world.commit(first, state=RunState.COMPLETED)
    for user_id, asks in ((BOB, False), (USER, True)):
        run_id = world.submit(user_id=user_id, conversation_must_exist=True).run.run_id
        world.claim(run_id)
        world.commit(run_id, state=RunState.COMPLETED, asks_title=True)
        assert (conversation(world).title_run_id == run_id) is asks
