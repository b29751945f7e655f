"""Jobs, notices and turns in the ledger (ASYNC-5 to ASYNC-7)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import RunId
from pawl.errors import ConversationBusy, IllegalTransition
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.background import Background, TurnTime
from pawl.job_store.ledger.rules.command import TopUp
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, OPEN_MAX, TRIES_MAX, TURN_DISTANCE, Entered
from pawl.values import CallState, MessagePolicy, RunState, StopCause
from tests.unit.job_store.desk import Desk, desk_with_a_job, desk_with_a_turn
from tests.unit.job_store.world import USER, change, delegation


def test_the_end_of_a_job_starts_one_turn_that_reports_it() -> None:
    desk, job = desk_with_a_job()
    assert desk.background.open_jobs_of(USER) == 1
    desk.end_job(job)
    (turn,) = desk.turns
    assert (desk.active, turn.generation, turn.claim_at, turn.queued_message) == (turn, 1, desk.now, None)
    desk.take(turn.run_id)
    assert desk.enter(turn.run_id) == (Entered(run_id=RunId(job), occasion=0),)
    desk.end(turn.run_id)
    assert desk.background == Background(turn_times=(TurnTime(user_id=USER, time=turn.create_time),))
    assert desk.active is None


def test_a_silent_job_is_closed_at_its_end_without_a_report(desk: Desk) -> None:
    run_id = desk.start_run()
    detached = change("call_s", CallState.DETACHED, child_run_id="job_s")
    silent = replace(delegation("call_s", "job_s", is_job=True), is_silent=True)
    desk.commit(run_id, calls=(detached,), delegations=(silent,))
    desk.end(run_id)
    desk.take("job_s")
    desk.commit("job_s", tells_iteration=1)
    desk.end("job_s")
    assert (desk.turns, desk.background) == ([], Background())


def test_turns_start_two_seconds_apart_even_after_a_top_up(desk: Desk) -> None:
    """ASYNC-5: the interval counts from the actual start, here half a minute after the planned start."""
    run_id = desk.start_run()
    first, second = desk.start_job(run_id), desk.start_job(run_id)
    desk.end(run_id)
    desk.end_job(first)
    desk.advance(30)
    desk.take(desk.turns[0].run_id)
    desk.enter(desk.turns[0].run_id)
    desk.end_job(second)
    desk.end(desk.turns[0].run_id)
    turn = desk.turns[1]
    desk.unit.put_run(replace(turn, token_budget=100))
    desk.send(turn.run_id, TopUp(tokens=10))
    assert desk.run(turn.run_id).claim_at == turn.claim_at
    assert turn.claim_at == desk.now + TURN_DISTANCE


def test_a_turn_does_not_inherit_its_jobs_top_ups() -> None:
    desk, job = desk_with_a_job()
    desk.unit.put_run(replace(desk.run(job), token_budget=100))
    desk.send(job, TopUp(tokens=30), "one")
    desk.send(job, TopUp(tokens=20), "two")
    desk.commit(desk.take(job), consumed=("one", "two"))
    desk.end_job(job)
    assert (desk.run(job).token_budget, desk.turns[0].token_budget) == (150, 100)


def test_an_unstarted_turn_does_not_use_a_store_queue_slot() -> None:
    desk, job = desk_with_a_job()
    desk.end_job(job)
    (turn,) = desk.turns
    assert turn.is_queued
    assert desk.queue == (0, 0)
    desk.take(turn.run_id)
    desk.end(turn.run_id)
    assert desk.queue == (0, 0)


def test_a_notice_not_allowed_to_start_a_turn_does_not_block_others() -> None:
    """After five generations a notice waits for the user. A job of the user's run is a first generation again."""
    desk, old = desk_with_a_job()
    desk.unit.put_run(replace(desk.run(old), generation=GENERATIONS_MAX))
    desk.end_job(old)
    assert desk.turns == []
    run_id = desk.start_run()
    desk.end_job(desk.start_job(run_id))
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.generation == 1


def test_a_failed_turn_is_repeated_until_it_has_failed_three_times() -> None:
    desk, turn = desk_with_a_turn()
    for count in (2, 3):
        desk.end(turn, RunState.FAILED)
        assert len(desk.turns) == count
        turn = desk.take(desk.turns[-1].run_id)
    desk.end(turn, RunState.FAILED)
    assert (len(desk.turns), desk.active) == (TRIES_MAX, None)


def test_stopping_a_turn_dismisses_the_notices_that_it_had_not_read_yet() -> None:
    desk, job = desk_with_a_job()
    desk.end_job(job)
    desk.cancel(desk.turns[0].run_id)
    assert (len(desk.turns), desk.background.notices) == (1, ())


def test_a_message_with_reject_is_refused_if_another_waits_behind_a_turn() -> None:
    desk, _ = desk_with_a_turn()
    desk.submit(MessagePolicy.REJECT)
    with pytest.raises(ConversationBusy):
        desk.submit(MessagePolicy.REJECT)


def test_a_quarantined_turn_does_not_block_messages() -> None:
    """The turn is quarantined for an operator, but the user need not wait for the operator."""
    first = [(MessagePolicy.QUEUE, True), (MessagePolicy.STEER, True)]
    for policy, is_first in [*((each, False) for each in MessagePolicy), *first]:
        desk, turn = desk_with_a_turn()
        submitted = desk.submit(policy) if is_first else None
        desk.apply(ReportCrash(run=desk.run(turn).key, epoch=desk.run(turn).epoch, crashes_max=1))
        submitted = submitted or desk.submit(policy)
        stopped = desk.run(turn)
        assert (stopped.state, stopped.stop_cause) == (RunState.CANCELLING, StopCause.SUPERSEDED), policy
        assert stopped.claim_at is not None, "a worker ends it"
        assert submitted.run.run_id in desk.conversation.queue, policy


def test_a_crashed_turn_that_is_being_stopped_ends_for_a_waiting_message() -> None:
    """No operator is needed: open calls get a result, and the waiting message becomes active."""
    for state, left in (
        (CallState.RUNNING, CallState.OUTCOME_UNKNOWN),
        (CallState.RUNNABLE, CallState.CANCELLED),
    ):
        desk, turn = desk_with_a_turn()
        desk.commit(turn, calls=(change("open", state),))
        asked = desk.submit(MessagePolicy.INTERRUPT).run.run_id
        crash = ReportCrash(run=desk.run(turn).key, epoch=desk.run(turn).epoch, crashes_max=1, lost=b"lost")
        assert desk.apply(crash) is False
        settled = desk.call("open")
        assert (desk.run(turn).state, settled.state, settled.result) == (RunState.CANCELLED, left, b"lost")
        assert desk.active == desk.run(asked)


def test_an_eleventh_job_is_refused_until_one_ends(desk: Desk) -> None:
    run_id = desk.start_run()
    jobs = [desk.start_job(run_id) for _ in range(OPEN_MAX)]
    with pytest.raises(IllegalTransition):
        desk.start_job(run_id)
    desk.end_job(jobs[0])
    desk.start_job(run_id)
    assert desk.background.open_jobs_of(USER) == OPEN_MAX
