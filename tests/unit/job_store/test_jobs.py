"""Jobs, notices and turns in the ledger (ASYNC-5 to ASYNC-7)."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from pawl.chassis.ids import RunId, UserId
from pawl.errors import ConversationBusy, IllegalTransition
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.background import Background, TurnTime
from pawl.job_store.ledger.rules.command import TopUp
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, OPEN_MAX, TRIES_MAX, TURN_DISTANCE, TURNS_MAX, Entered
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.states import Sharing
from pawl.values import CallState, MessagePolicy, RunState, StopCause
from tests.unit.job_store.desk import Desk, desk_with_a_job, desk_with_a_turn
from tests.unit.job_store.world import BOB, USER, change, delegation


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


def test_a_top_up_does_not_start_a_turn_early(desk: Desk) -> None:
    run_id = desk.start_run()
    first, second = desk.start_job(run_id), desk.start_job(run_id)
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
    """After five generations a notice waits for the user; a job of the user's run starts afresh."""
    desk, old = desk_with_a_job()
    desk.unit.put_run(replace(desk.run(old), generation=GENERATIONS_MAX))
    desk.end_job(old)
    assert desk.turns == []
    run_id = desk.start_run()
    job = desk.start_job(run_id)
    desk.end_job(job)
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.generation == 1


def test_a_message_with_reject_is_refused_if_another_waits_behind_a_turn() -> None:
    desk, _ = desk_with_a_turn()
    desk.submit(MessagePolicy.REJECT)
    with pytest.raises(ConversationBusy):
        desk.submit(MessagePolicy.REJECT)


def test_a_quarantined_turn_does_not_block_messages() -> None:
    """The turn is quarantined for an operator; the user does not wait for that."""
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


class JobMachine(RuleBasedStateMachine):
    """Random interleavings of notices, turns and messages of two users, against a simple model."""

    @initialize()
    def create_desk(self) -> None:
        self.desk = Desk()
        # State of each job's end: PENDING, ENTERED by a run, ANSWERED or DISMISSED.
        self.job_ends: dict[str, str] = {}
        self.turn_starts: list[datetime] = []
        # Users whose model received a notice and has not answered.
        self.notified_users: set[UserId] = set()
        self.desk.take(self.desk.submit().run.run_id)
        self.desk.unit.put_conversation(replace(self.desk.conversation, sharing=Sharing.WRITE))
        self.start_job()

    @rule(policy=st.sampled_from(list(MessagePolicy)), user_id=st.sampled_from([USER, BOB]))
    def say(self, policy: MessagePolicy, user_id: UserId) -> None:
        active = self.desk.active
        gives_way = active is not None and active.is_turn and active.user_id == user_id
        waits = active is not None and active.last_commit is None and active.worker_id is None
        if active is not None and not gives_way and policy in {MessagePolicy.REJECT, MessagePolicy.STEER}:
            return
        if active is not None and active.user_id != user_id and policy is MessagePolicy.INTERRUPT:
            return
        queue = self.desk.conversation.queue
        if active is not None and policy is MessagePolicy.REJECT and queue:
            return
        submitted = self.desk.submit(policy, user_id=user_id)
        if active is None or (gives_way and waits and not queue):
            assert submitted.queue_position == 0
        if active is not None and active.user_id != user_id:
            assert self.desk.run(active.run_id) == active

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.desk.advance(seconds)

    @precondition(lambda self: self.desk.active is not None and self.desk.active.worker_id is None)
    @rule()
    def take(self) -> None:
        active = self.desk.active
        assert active is not None
        self.desk.take(active.run_id)
        if active.is_turn:
            self.turn_starts.append(self.desk.now)

    @precondition(lambda self: self._held() is not None)
    @rule()
    def start_job(self) -> None:
        held = self._held()
        assert held is not None
        if held.state is RunState.RUNNING and self.desk.background.open_jobs_of(held.user_id) < OPEN_MAX:
            self.desk.start_job(held.run_id)

    @precondition(lambda self: self._open_jobs)
    @rule(number=st.integers(0, 9))
    def tell(self, number: int) -> None:
        job = self._open_jobs[number % len(self._open_jobs)]
        if job.worker_id is None:
            self.desk.take(job.run_id)
        self.desk.commit(job.run_id, tells_iteration=self.desk.number())

    @precondition(lambda self: self._open_jobs)
    @rule(number=st.integers(0, 9), is_stopped=st.booleans())
    def end_job(self, number: int, is_stopped: bool) -> None:  # drawn
        job = self._open_jobs[number % len(self._open_jobs)]
        if is_stopped and job.worker_id is None:
            self.desk.cancel(job.run_id)
        else:
            self.desk.end_job(job.run_id)
        self.job_ends[job.run_id] = "PENDING"

    @precondition(lambda self: self._held() is not None)
    @rule()
    def enter(self) -> None:
        held = self._held()
        assert held is not None
        for each in self.desk.enter(held.run_id):
            self.notified_users.add(held.user_id)
            assert self.desk.run(each.run_id).user_id == held.user_id
            if each.occasion == 0:
                assert self.job_ends[each.run_id] == "PENDING"
                self.job_ends[each.run_id] = "ENTERED"

    @precondition(lambda self: self._held() is not None)
    @rule(state=st.sampled_from([RunState.COMPLETED, RunState.FAILED]))
    def end(self, state: RunState) -> None:
        held = self._held()
        assert held is not None
        if held.state is RunState.CANCELLING:
            self.desk.end(held.run_id, RunState.CANCELLED)
            self._dismiss(held)
        else:
            self.desk.end(held.run_id, state)
            if state is RunState.COMPLETED:
                self._move(held, "ENTERED", "ANSWERED")

    @precondition(lambda self: self.desk.active is not None)
    @rule()
    def stop(self) -> None:
        active = self.desk.active
        assert active is not None
        if active.state is not RunState.CANCELLING:
            self.desk.cancel(active.run_id)
            if self.desk.run(active.run_id).state.is_terminal:
                self._dismiss(self.desk.run(active.run_id))

    @invariant()
    def one_is_active(self) -> None:
        active = [run for run in self.desk.runs if run.queued_message is None and not run.state.is_terminal]
        assert len(active) <= 1
        assert active == ([] if self.desk.active is None else [self.desk.active])

    @invariant()
    def jobs_are_counted(self) -> None:
        noted = {each.run_id: each.user_id for each in self.desk.background.open_jobs}
        assert noted == {job.run_id: job.user_id for job in self._open_jobs}
        assert all(self.desk.background.open_jobs_of(user_id) <= OPEN_MAX for user_id in (USER, BOB))

    @invariant()
    def each_end_is_where_it_belongs(self) -> None:
        notices = {each.run_id: each for each in self.desk.background.notices if not each.occasion}
        for job, how in self.job_ends.items():
            assert (job in notices) == (how in {"PENDING", "ENTERED"}), (job, how)
            if job in notices:
                assert bool(notices[RunId(job)].entered_by) == (how == "ENTERED")

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        if self.desk.active is not None:
            return
        generations = {job.run_id: job.generation for job in self.desk.jobs}
        waiting = [each for each in self.desk.background.notices if not each.entered_by or each.tries]
        if any(generations[each.run_id] < GENERATIONS_MAX and each.tries < TRIES_MAX for each in waiting):
            assert len(self.desk.background.turn_times) >= TURNS_MAX

    @invariant()
    def turns_keep_their_minimum_interval(self) -> None:
        for first, second in zip(self.turn_starts, self.turn_starts[1:], strict=False):
            assert second - first >= timedelta(seconds=2)

    @invariant()
    def one_iteration_of_a_job_waits(self) -> None:
        waiting = [each.run_id for each in self.desk.background.notices if each.occasion and not each.entered_by]
        assert len(waiting) == len(set(waiting))

    @property
    def _open_jobs(self) -> list[RunRow]:
        return [job for job in self.desk.jobs if not job.state.is_terminal]

    def _held(self) -> RunRow | None:
        active = self.desk.active
        return active if active is not None and active.worker_id is not None else None

    def _dismiss(self, run: RunRow) -> None:
        if run.is_turn and run.stop_cause is StopCause.USER:
            self._move(run, "ENTERED" if run.user_id in self.notified_users else "PENDING", "DISMISSED")

    def _move(self, run: RunRow, before: str, after: str) -> None:
        """Move the job ends of a run's user from one state to another."""
        self.notified_users.discard(run.user_id)
        moved = (
            job for job, how in self.job_ends.items() if how == before and self.desk.run(job).user_id == run.user_id
        )
        self.job_ends |= dict.fromkeys(list(moved), after)


TestJobMachine = JobMachine.TestCase
TestJobMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
