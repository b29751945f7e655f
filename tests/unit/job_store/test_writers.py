"""Conversations shared for writing: writers start their own runs and cannot affect other runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, RunId, UserId
from pawl.errors import ConversationBusy, ConversationNotFound, QueueFull, RunOfAnotherUser
from pawl.job_store.ledger.rules.conversations import UpdateConversation
from pawl.job_store.ledger.rules.jobs import Entered
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow
from pawl.job_store.ledger.rules.states import Sharing
from pawl.values import MessagePolicy, RunState, StopCause
from tests.tables import for_each
from tests.unit.job_store.desk import Desk
from tests.unit.job_store.world import BOB, STORE, USER, World

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


def shared() -> tuple[Desk, str]:
    """Return a world with a conversation of ann that is shared for writing, and her run in it."""
    world = Desk()
    run_id = world.start_run()
    share(world, Sharing.WRITE)
    return world, run_id


def test_writers_leave_half_of_the_queue_to_the_owner() -> None:
    world, _ = shared()
    for _ in range(2):
        world.submit(user_id=BOB, queue_max=3)
    with pytest.raises(QueueFull):
        world.submit(user_id=BOB, queue_max=3)
    world.submit(queue_max=3)


def test_writers_may_undo_only_their_own_runs() -> None:
    world, first = shared()
    world.commit(first, state=RunState.COMPLETED)
    theirs = world.start_run(user_id=BOB)
    world.commit(theirs, state=RunState.COMPLETED)
    share(world, Sharing.READ)
    assert world.submit(user_id=BOB, undoes=theirs).run.user_id == BOB
    elsewhere = world.start_run(user_id=BOB, conversation_id="other")
    for undone, user_id in ((first, BOB), (theirs, UserId("eve")), ("absent", BOB), (elsewhere, BOB)):
        with pytest.raises(ConversationNotFound):
            world.submit(user_id=user_id, undoes=undone)
    world.unit.put_conversation(replace(world.conversation, user_id=UserId(""), erase_user_id=USER))
    with pytest.raises(ConversationNotFound):
        world.submit(user_id=BOB, undoes=theirs)


def test_writers_runs_stop_when_write_sharing_ends() -> None:
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


def desk_of_two() -> tuple[Desk, str, str]:
    """Return a conversation of ann that is shared for writing, with one open job each of ann and bob."""
    desk = Desk()
    jobs = []
    for user_id in (USER, BOB):
        run_id = desk.start_run(user_id=user_id)
        share(desk, Sharing.WRITE)
        jobs.append(desk.start_job(run_id))
        desk.end(run_id)
    mine, theirs = jobs
    return desk, mine, theirs


def test_a_notice_enters_only_runs_of_the_job_owner() -> None:
    desk, mine, theirs = desk_of_two()
    run_id = desk.start_run()
    desk.end_job(theirs)
    assert not desk.unit.wakeups.rows, "ann's run is not woken"
    desk.commit(run_id, entered=(Entered(run_id=RunId(theirs), occasion=0),))
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.user_id == BOB
    desk.end_job(mine)
    assert [each.run_id for each in desk.enter(desk.take(turn.run_id))] == [theirs]
    desk.end(turn.run_id)
    assert [turn.user_id for turn in desk.turns] == [BOB, USER]
    assert [each.run_id for each in desk.enter(desk.take(desk.turns[1].run_id))] == [mine]


@for_each("has_started", [False, True])
def test_other_users_cannot_stop_or_steer_a_turn(has_started: bool) -> None:
    """A turn is protected like a run that a message started, even before the turn starts."""
    desk, _, theirs = desk_of_two()
    desk.end_job(theirs)
    (turn,) = desk.turns
    if has_started:
        desk.take(turn.run_id)
        desk.commit(turn.run_id, state=RunState.WAITING, waits=(1,))
    for policy, error in (
        (MessagePolicy.STEER, RunOfAnotherUser),
        (MessagePolicy.INTERRUPT, RunOfAnotherUser),
        (MessagePolicy.REJECT, ConversationBusy),
    ):
        with pytest.raises(error):
            desk.submit(policy)
    assert desk.submit().queue_position == 1
    assert desk.active is not None
    assert (desk.active.run_id, desk.active.stop_cause) == (turn.run_id, None)
    desk.submit(user_id=BOB)
    assert desk.run(turn.run_id).stop_cause is StopCause.SUPERSEDED


def test_users_who_steered_a_job_count_as_steering_its_turns() -> None:
    """Therefore these users cannot be second approvers in turns that report the job's end."""
    desk, mine, _ = desk_of_two()
    desk.unit.put_run(replace(desk.run(mine), steered_by=(UserId("carl"),), delegate_user_id=UserId("dora")))
    run_id = desk.start_run()
    desk.end_job(mine)
    desk.enter(run_id)
    assert desk.run(run_id).steered_by == ("carl", "dora")
