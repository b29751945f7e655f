"""Conversations that are shared for writing: others begin runs of their own, and touch no run of anybody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RequestId, RunId, UserId
from pawl.errors import ConversationBusy, ConversationNotFound, QueueFull, RunOfAnotherUser
from pawl.job_store.domain.attention import ReportCrash
from pawl.job_store.domain.conversations import UpdateConversation
from pawl.job_store.domain.jobs import Entered
from pawl.job_store.domain.rows import ConversationKey, ConversationRow
from pawl.job_store.domain.states import Sharing
from pawl.values import MessagePolicy, RunState, StopCause
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


def desk_of_two() -> tuple[Desk, str, str]:
    """A conversation of ann that is shared for writing, with an open job of hers and one of bob."""
    desk = Desk()
    jobs = []
    for user_id in (USER, BOB):
        run_id = desk.begin(user_id=user_id)
        share(desk, Sharing.WRITE)
        jobs.append(desk.begin_job(run_id))
        desk.end(run_id)
    mine, theirs = jobs
    return desk, mine, theirs


def test_a_notice_enters_only_runs_of_the_user_who_started_the_job() -> None:
    desk, mine, theirs = desk_of_two()
    run_id = desk.begin()
    desk.end_job(theirs)
    assert not desk.unit.wakeups.rows, "ann's run has no news"
    desk.commit(run_id, entered=(Entered(run_id=RunId(theirs), occasion=0),))
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.user_id == BOB
    desk.end_job(mine)
    assert [each.run_id for each in desk.enter(desk.take(turn.run_id))] == [theirs]
    desk.end(turn.run_id)
    assert [turn.user_id for turn in desk.turns] == [BOB, USER]
    assert [each.run_id for each in desk.enter(desk.take(desk.turns[1].run_id))] == [mine]


def test_a_run_answers_only_notices_of_its_user() -> None:
    """What ann's failed turn told is tried again after bob's run, and is not answered by that."""
    desk, mine, theirs = desk_of_two()
    desk.end_job(mine)
    failing = desk.take(desk.turns[0].run_id)
    desk.enter(failing)
    waiting = desk.submit(user_id=BOB).run.run_id
    desk.end(failing, RunState.FAILED)
    desk.take(waiting)
    desk.end(waiting)
    assert [(each.run_id, each.tries) for each in desk.background.notices] == [(mine, 1)]
    assert [turn.user_id for turn in desk.turns] == [USER, USER]
    desk.end_job(theirs)
    desk.cancel(desk.turns[1].run_id)
    assert [each.run_id for each in desk.background.notices] == [theirs], "ann dismisses what her model was told"
    desk, mine, theirs = desk_of_two()
    desk.end_job(mine)
    desk.end_job(theirs)
    desk.cancel(desk.turns[0].run_id)
    assert [each.run_id for each in desk.background.notices] == [theirs], "and what it was about to be told"


def test_no_other_user_stops_or_steers_a_turn() -> None:
    """It is protected as a run that a message started is, before it has begun, too."""
    for has_begun in (False, True):
        desk, _, theirs = desk_of_two()
        desk.end_job(theirs)
        (turn,) = desk.turns
        if has_begun:
            desk.take(turn.run_id)
            desk.commit(turn.run_id, state=RunState.WAITING, waits=(1,))
        for policy, error in (
            (MessagePolicy.STEER, RunOfAnotherUser),
            (MessagePolicy.INTERRUPT, RunOfAnotherUser),
            (MessagePolicy.REJECT, ConversationBusy),
        ):
            with pytest.raises(error):
                desk.submit(policy)
        assert desk.submit().place == 1
        assert desk.active is not None
        assert (desk.active.run_id, desk.active.stop_cause) == (turn.run_id, None)
        desk.submit(user_id=BOB)
        assert desk.run(turn.run_id).stop_cause is StopCause.SUPERSEDED


def test_a_turn_whose_workers_died_gives_way_to_a_message_of_any_user() -> None:
    desk, _, theirs = desk_of_two()
    desk.end_job(theirs)
    turn = desk.take(desk.turns[0].run_id)
    desk.apply(ReportCrash(run=desk.run(turn).key, epoch=desk.run(turn).epoch, crashes_max=1))
    desk.submit()
    assert desk.run(turn).stop_cause is StopCause.SUPERSEDED


def test_notices_of_who_may_not_write_any_more_stay_with_their_jobs() -> None:
    desk, mine, theirs = desk_of_two()
    desk.end_job(mine)
    desk.commit(desk.take(theirs), tells_iteration=1)
    share(desk, Sharing.PRIVATE)
    assert [each.run_id for each in desk.background.notices] == [mine]
    desk.end_job(theirs)
    assert (desk.background.open_jobs, [each.run_id for each in desk.background.notices]) == ((), [mine])
    (turn,) = desk.turns
    desk.enter(desk.take(turn.run_id))
    desk.end(turn.run_id)
    assert (desk.active, desk.background.notices) == (None, ())


def test_who_steered_a_job_has_steered_the_runs_that_its_notices_enter() -> None:
    """So no one of them is a second person who approves a call there."""
    desk, mine, _ = desk_of_two()
    job = replace(desk.run(mine), steered_by=(UserId("carl"),), delegate_user_id=UserId("dora"))
    desk.unit.put_run(job)
    run_id = desk.begin()
    desk.end_job(mine)
    desk.enter(run_id)
    assert desk.run(run_id).steered_by == ("carl", "dora")
