"""Conversations that are shared for writing: others begin runs of their own, and touch no run of anybody else."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, UserId
from pawl.errors import ConversationNotFound, PawlError, QueueFull, RunOfAnotherUser
from pawl.job_store.domain.command import Cancel
from pawl.job_store.domain.conversations import UpdateConversation
from pawl.job_store.domain.rows import ConversationKey, ConversationRow
from pawl.job_store.domain.states import CommandOutcome, MessagePolicy, RunState, Sharing, StopCause
from tests.unit.job_store.world import STORE, USER, World

BOB = UserId("bob")
KEY = ConversationKey(STORE, ConversationId("conv"))
ON_THE_ACTIVE = (MessagePolicy.STEER, MessagePolicy.INTERRUPT)


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


def test_a_message_of_a_writer_begins_a_run_of_the_writer_after_those_that_are_there() -> None:
    world, first = shared()
    queued = world.submit().run.run_id
    submitted = world.submit(user_id=BOB, conversation_must_exist=True)
    assert (submitted.run.user_id, submitted.place) == (BOB, 2)
    assert conversation(world).queue == (queued, submitted.run.run_id)
    for run_id in (first, queued):
        world.claim(run_id)
        world.commit(run_id, state=RunState.COMPLETED)
    world.claim(submitted.run.run_id)
    assert [(row.run_id, row.user_id) for row in world.unit.messages.rows] == [
        (first, ""),
        (queued, ""),
        (submitted.run.run_id, BOB),
    ]


@pytest.mark.parametrize("sharing", [Sharing.PRIVATE, Sharing.READ])
def test_what_is_not_shared_for_writing_takes_no_message_of_others(sharing: Sharing) -> None:
    world, _ = shared()
    share(world, sharing)
    with pytest.raises(ConversationNotFound):
        world.submit(user_id=BOB)


def test_the_key_of_its_user_leads_nobody_else_to_it() -> None:
    world = World()
    mine = world.submit(conversation_id="", key_hash=b"k").run
    key = ConversationId(mine.conversation_id)
    row = world.unit.conversations.get(ConversationKey(STORE, key))
    assert row is not None
    world.unit.put_conversation(replace(row, sharing=Sharing.WRITE))
    assert world.submit(user_id=BOB, conversation_id="", key_hash=b"k").run.conversation_id != key


@pytest.mark.parametrize("policy", ON_THE_ACTIVE)
def test_nobody_steers_or_interrupts_a_run_of_another_user(policy: MessagePolicy) -> None:
    world, first = shared()
    with pytest.raises(RunOfAnotherUser):
        world.submit(policy, user_id=BOB)
    theirs = world.submit(user_id=BOB).run.run_id
    world.commit(first, state=RunState.COMPLETED)
    world.claim(theirs)
    world.commit(theirs, state=RunState.RUNNING)
    with pytest.raises(RunOfAnotherUser):
        world.submit(policy)
    assert not world.unit.inbox(world.run(theirs))
    assert world.submit(policy, user_id=BOB).run.user_id == BOB


def test_commands_reach_no_run_of_another_user_either_way() -> None:
    world, first = shared()
    theirs = world.submit(user_id=BOB).run.run_id
    assert world.cancel(theirs).outcome is CommandOutcome.UNKNOWN
    assert world.send(first, Cancel(cause=StopCause.USER), user_id=BOB).outcome is CommandOutcome.UNKNOWN


def test_a_writer_leaves_the_archive_as_it_is() -> None:
    world, _ = shared()
    row = conversation(world)
    world.unit.put_conversation(replace(row, archived=True))
    world.submit(user_id=BOB)
    assert conversation(world).archived
    world.submit()
    assert not conversation(world).archived


def test_writers_leave_half_of_the_queue_to_its_user() -> None:
    world, _ = shared()
    for _ in range(2):
        world.submit(user_id=BOB, queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(user_id=BOB, queue_max=3)
    world.submit(queue_max=3)


def test_a_writer_who_interrupts_a_run_of_the_writer_goes_before_nobody() -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    theirs = world.begin(user_id=BOB)
    mine = world.submit().run.run_id
    again = [world.submit(MessagePolicy.INTERRUPT, user_id=BOB).run.run_id for _ in range(2)]
    assert world.run(theirs).stop_cause is StopCause.SUPERSEDED
    assert conversation(world).queue == (mine, *again)
    world.commit(theirs, state=RunState.CANCELLED)
    assert conversation(world).active_run_id == mine


@pytest.mark.parametrize("sharing", [Sharing.PRIVATE, Sharing.READ])
def test_writers_undo_their_own_runs_of_it_whatever_is_shared(sharing: Sharing) -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    theirs = world.begin(user_id=BOB)
    world.commit(theirs, state=RunState.COMPLETED)
    share(world, sharing)
    assert world.submit(user_id=BOB, undoes=theirs).run.user_id == BOB
    elsewhere = world.begin(user_id=BOB, conversation_id="other")
    row = conversation(world)
    for undone, user_id in ((first, BOB), (theirs, UserId("eve")), ("absent", BOB), (elsewhere, BOB)):
        with pytest.raises(ConversationNotFound):
            world.submit(user_id=user_id, undoes=undone)
    world.unit.put_conversation(replace(row, user_id=UserId(""), erase_user_id=USER))
    with pytest.raises(ConversationNotFound):
        world.submit(user_id=BOB, undoes=theirs)


@pytest.mark.parametrize("sharing", [Sharing.PRIVATE, Sharing.READ])
def test_runs_of_writers_are_stopped_when_it_is_not_shared_for_writing_any_more(sharing: Sharing) -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    active, waiting = (world.submit(user_id=BOB).run.run_id for _ in range(2))
    world.claim(active)
    world.commit(active, state=RunState.RUNNING)
    mine = world.submit().run.run_id
    changed = share(world, sharing)
    assert (changed.sharing, changed.queue, changed.active_run_id) == (sharing, (mine,), active)
    assert (world.run(waiting).state, world.run(waiting).stop_cause) == (RunState.CANCELLED, StopCause.USER)
    assert world.run(active).state is RunState.CANCELLING
    assert [(each.name, each.user_id, each.payload) for each in world.unit.inbox(world.run(active))] == [
        ("cancel", USER, b"cancel")
    ]
    world.commit(active, state=RunState.CANCELLED)
    assert world.run(mine).claim_at == world.now


def test_the_turn_of_a_writers_run_that_had_not_begun_goes_to_the_next_of_its_user() -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    theirs = [world.submit(user_id=user).run.run_id for user in (BOB, BOB, UserId("eve"))]
    mine = world.submit().run.run_id
    changed = share(world, Sharing.PRIVATE)
    assert {world.run(run_id).state for run_id in theirs} == {RunState.CANCELLED}
    assert (changed.active_run_id, changed.queue) == (mine, ())


def test_only_its_user_shares_it() -> None:
    world, _ = shared()
    with pytest.raises(ConversationNotFound):
        share(world, Sharing.PRIVATE, BOB)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "share", "end"]),
            st.sampled_from([USER, BOB, UserId("eve")]),
            st.sampled_from(list(MessagePolicy)),
            st.sampled_from(list(Sharing)),
        ),
        max_size=30,
    )
)
@example(
    [
        ("submit", BOB, MessagePolicy.QUEUE, Sharing.WRITE),
        ("end", USER, MessagePolicy.QUEUE, Sharing.WRITE),
        ("submit", USER, MessagePolicy.QUEUE, Sharing.WRITE),
        ("submit", BOB, MessagePolicy.INTERRUPT, Sharing.WRITE),
    ]
)
def test_whatever_happens_no_run_is_touched_by_a_message_of_another_user(
    steps: list[tuple[str, UserId, MessagePolicy, Sharing]],
) -> None:
    """And none of a writer is open, and not being stopped, where it is not shared for writing."""
    world, _ = shared()
    for kind, user_id, policy, sharing in steps:
        before = dict(world.unit.runs.items())
        try:
            match kind:
                case "submit":
                    world.submit(policy, user_id=user_id)
                case "share":
                    share(world, sharing)
                case _:
                    _end_active(world)
        except PawlError:
            assert dict(world.unit.runs.items()) == before
        touched = [row for key, row in before.items() if world.unit.runs.get(key) is not row]
        if kind == "submit":
            # One that waited has its turn where the message has ended a run of its own user.
            turn_id = conversation(world).active_run_id
            others = [row for row in touched if row.user_id != user_id]
            assert all(row.queued_message is not None and row.run_id == turn_id for row in others)
        if conversation(world).sharing is not Sharing.WRITE:
            going = [row for _, row in world.unit.runs.items() if not (row.state.is_terminal or row.is_stopping)]
            assert all(row.user_id == USER for row in going)


def _end_active(world: World) -> None:
    run_id = conversation(world).active_run_id
    if run_id is None:
        return
    run = world.run(run_id)
    if run.worker_id is None:
        world.claim(run_id)
    run = world.run(run_id)
    for command in world.unit.inbox(run):
        world.unit.put_command(replace(command, consumed=True))
    if run.state is RunState.QUEUED:
        world.commit(run_id, state=RunState.RUNNING)
    ends = RunState.CANCELLED if run.is_stopping else RunState.COMPLETED
    world.commit(run_id, state=ends)


def test_the_run_of_a_writer_makes_no_title() -> None:
    world, first = shared()
    world.claim(first)
    world.commit(first, state=RunState.COMPLETED)
    for user_id, asks in ((BOB, False), (USER, True)):
        run_id = world.submit(user_id=user_id, conversation_must_exist=True).run.run_id
        world.claim(run_id)
        world.commit(run_id, state=RunState.COMPLETED, asks_title=True)
        assert (conversation(world).title_run_id == run_id) is asks
