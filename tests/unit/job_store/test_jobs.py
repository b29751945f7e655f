"""Jobs, notices and turns, as the ledger judges them (ASYNC-5 to ASYNC-7)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import RunId
from pawl.errors import ConversationBusy, IllegalTransition
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.background import Background, TurnTime
from pawl.job_store.ledger.rules.command import TopUp
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, OPEN_MAX, TURN_DISTANCE, Entered
from pawl.values import CallState, MessagePolicy, RunState, StopCause
from tests.unit.job_store.desk import Desk, desk_with_a_job, desk_with_a_turn
from tests.unit.job_store.world import USER, change, delegation


def test_the_end_of_a_job_begins_a_turn_that_tells_of_it_once() -> None:
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


def test_a_silent_job_tells_nothing_and_is_not_open_any_more_once_it_has_ended(desk: Desk) -> None:
    run_id = desk.begin()
    detached = change("call_s", CallState.DETACHED, child_run_id="job_s")
    silent = replace(delegation("call_s", "job_s", is_job=True), is_silent=True)
    desk.commit(run_id, calls=(detached,), delegations=(silent,))
    desk.end(run_id)
    desk.take("job_s")
    desk.commit("job_s", tells_iteration=1)
    desk.end("job_s")
    assert (desk.turns, desk.background) == ([], Background())


def test_a_top_up_does_not_begin_a_turn_before_its_time(desk: Desk) -> None:
    run_id = desk.begin()
    first, second = desk.begin_job(run_id), desk.begin_job(run_id)
    desk.end(run_id)
    desk.end_job(first)
    desk.take(desk.turns[0].run_id)
    desk.enter(desk.turns[0].run_id)
    desk.end_job(second)
    desk.end(desk.turns[0].run_id)
    turn = desk.turns[1]
    desk.unit.put_run(replace(turn, token_budget=100))
    desk.send(turn.run_id, TopUp(tokens=10))
    assert desk.run(turn.run_id).claim_at == turn.claim_at
    assert turn.claim_at == desk.now + TURN_DISTANCE


def test_a_turn_has_the_budget_of_its_options_and_not_what_was_added_to_its_job() -> None:
    desk, job = desk_with_a_job()
    desk.unit.put_run(replace(desk.run(job), token_budget=100))
    desk.send(job, TopUp(tokens=30), "one")
    desk.send(job, TopUp(tokens=20), "two")
    desk.commit(desk.take(job), consumed=("one", "two"))
    desk.end_job(job)
    assert (desk.run(job).token_budget, desk.turns[0].token_budget) == (150, 100)


def test_a_turn_that_has_not_begun_keeps_nobody_out_of_a_full_store() -> None:
    desk, job = desk_with_a_job()
    desk.end_job(job)
    (turn,) = desk.turns
    assert turn.is_queued
    assert desk.queue == (0, 0)
    desk.take(turn.run_id)
    desk.end(turn.run_id)
    assert desk.queue == (0, 0)


def test_a_notice_that_may_begin_no_turn_keeps_no_other_from_it() -> None:
    """One that comes of five turns waits for the user; one of a job that the user's run began does not."""
    desk, old = desk_with_a_job()
    desk.unit.put_run(replace(desk.run(old), generation=GENERATIONS_MAX))
    desk.end_job(old)
    assert desk.turns == []
    run_id = desk.begin()
    job = desk.begin_job(run_id)
    desk.end_job(job)
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.generation == 1


def test_what_wants_no_company_is_refused_where_a_message_waits_for_a_turn_to_end() -> None:
    desk, _ = desk_with_a_turn()
    desk.submit(MessagePolicy.REJECT)
    with pytest.raises(ConversationBusy):
        desk.submit(MessagePolicy.REJECT)


def test_a_turn_whose_workers_die_keeps_no_message_waiting() -> None:
    """It is quarantined, and an operator may let another one try; the user does not wait for that."""
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


def test_a_turn_that_is_stopped_and_whose_workers_die_ends_for_the_message() -> None:
    """No operator is needed: what was open has its result, and who waits gets the turn."""
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


def test_an_eleventh_job_is_refused_and_one_that_ends_makes_room(desk: Desk) -> None:
    run_id = desk.begin()
    jobs = [desk.begin_job(run_id) for _ in range(OPEN_MAX)]
    with pytest.raises(IllegalTransition):
        desk.begin_job(run_id)
    desk.end_job(jobs[0])
    desk.begin_job(run_id)
    assert desk.background.open_jobs_of(USER) == OPEN_MAX
