"""Notices and turns of background jobs, also of delegated runs (ASYNC-5)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import ConversationBusy, IllegalTransition
from pawl.job_store.ledger.rules import stop
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.background import Background, Notice, OpenJob, TurnTime
from pawl.job_store.ledger.rules.command import Cancel, TopUp
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, OPEN_MAX, TRIES_MAX, TURN_DISTANCE, Entered
from pawl.values import CallState, Feature, MessagePolicy, RunState, StopCause
from tests.tables import for_each
from tests.unit.job_store.desk import Desk, desk_with_a_turn
from tests.unit.job_store.world import STORE, USER, change, delegation


@given(entered=st.integers(0, 3), pending=st.booleans(), is_open=st.booleans())
def test_a_failed_run_passes_on_only_notices_that_are_not_outdated(
    *, entered: int, pending: bool, is_open: bool
) -> None:
    """Of a job's iterations one notice waits at most, and none that it had received waits behind the end."""
    job: dict[str, Any] = {"run_id": RunId("j"), "user_id": USER, "above": (RunId("a"), RunId("b"), RunId("c"))}
    notices = [Notice(**job, occasion=number, entered_by=RunId("a")) for number in range(1, entered + 1)]
    notices += [Notice(**job, occasion=9)] if pending else []
    notices += [] if is_open else [Notice(**job, occasion=0)]
    open_jobs = (OpenJob(**job),) if is_open else ()
    passed = Background(notices=tuple(notices), open_jobs=open_jobs).passed_on({"a"})
    expected = [9] if pending else [entered] if entered and is_open else []
    assert [each.occasion for each in passed.notices] == expected + ([] if is_open else [0])


def test_a_delegated_run_receives_the_end_of_its_job(desk: Desk, root: str, agent: str) -> None:
    job = desk.start_job(agent)
    assert (desk.run(job).reports_to, desk.run(job).agents_above) == ("conv", (agent, root))
    desk.end_job(job)
    assert desk.unit.wakeups.rows[-1].run.run_id == agent
    assert desk.enter(root) == ()
    assert desk.enter(agent) == (Entered(run_id=RunId(job), occasion=0),)
    desk.answer(agent)
    assert desk.background == Background()
    desk.end(root)
    assert desk.turns == []


@pytest.mark.parametrize("state", [RunState.COMPLETED, RunState.FAILED])
def test_the_next_run_above_gets_the_notices_that_a_delegated_run_has_not_received(
    desk: Desk, root: str, state: RunState
) -> None:
    middle = desk.delegate(root)
    low = desk.delegate(middle)
    early, late = desk.start_job(low), desk.start_job(low)
    desk.end_job(early)
    desk.answer(low, state)
    assert [each.run_id for each in desk.enter(middle)] == [early]
    desk.answer(middle, state)
    desk.end_job(late)
    expected = [late] if state is RunState.COMPLETED else [early, late]
    assert [each.run_id for each in desk.enter(root)] == expected
    desk.end(root)
    assert (desk.turns, desk.background) == ([], Background())


@pytest.mark.parametrize("is_job_first", [True, False])
def test_a_job_and_its_delegated_run_that_end_together_start_only_one_turn(
    desk: Desk, root: str, *, is_job_first: bool
) -> None:
    """The root run has ended, because the delegated run belongs to a job."""
    outer = desk.start_job(root)
    desk.commit(root, state=RunState.COMPLETED)
    agent = desk.delegate(desk.take(outer))
    job = desk.start_job(agent)
    assert desk.run(job).agents_above == (agent, root)
    desk.take(job)
    for run_id in (job, agent) if is_job_first else (agent, job):
        desk.end(run_id)
    (turn,) = desk.turns
    assert (turn.is_turn, turn.conversation_id, desk.background.notices[0].receiver) == (True, "conv", "")
    desk.take(turn.run_id)
    assert [each.run_id for each in desk.enter(turn.run_id)] == [job]


def test_a_turn_for_a_delegated_job_has_the_agent_and_the_budget_of_the_root_run() -> None:
    desk = Desk()
    root = desk.start_run(agent_name="front", options=b"front", token_budget=100)
    agent = desk.delegate(root)
    desk.unit.put_run(replace(desk.run(agent), agent_name="back", options=b"back"))
    job = desk.start_job(agent)
    assert desk.run(job).budget_run_id == root, "the job keeps its budget when its starter ends"
    desk.answer(agent)
    desk.end(root)
    desk.end_job(job)
    (turn,) = desk.turns
    assert (turn.agent_name, turn.options, turn.token_budget, turn.budget_run_id) == ("front", b"front", 100, root)


def test_a_run_that_ended_before_the_run_below_it_does_not_receive_anything(desk: Desk, root: str) -> None:
    """A cancelled run does not wait for the runs below it."""
    middle = desk.delegate(root)
    low = desk.delegate(middle)
    job = desk.start_job(low)
    desk.unit.put_run(replace(desk.run(middle), state=RunState.CANCELLED))
    desk.end_job(job)
    desk.end(low)
    assert [each.run_id for each in desk.enter(root)] == [job]


@pytest.mark.parametrize("is_below_job", [True, False])
def test_a_job_that_starts_below_a_cancelled_run_is_cancelled_without_a_report(
    desk: Desk, root: str, *, is_below_job: bool
) -> None:
    """I12: the cancellation reaches the runs below only with the next step of each run above."""
    stopped = desk.take(desk.start_job(root)) if is_below_job else root
    low = desk.delegate(stopped) if is_below_job else desk.delegate(desk.delegate(stopped))
    early = desk.start_job(low)
    desk.cancel(stopped)
    late = desk.start_job(low)
    assert (desk.run(late).state, desk.run(late).stop_cause) == (RunState.CANCELLED, StopCause.PARENT)
    assert desk.run(early).state is RunState.QUEUED
    assert ([each.run_id for each in desk.background.open_jobs if each.run_id == late], desk.background.notices) == (
        [],
        (),
    )


def test_the_end_of_a_delegated_run_names_its_open_jobs(desk: Desk, root: str, agent: str) -> None:
    over, still_open = desk.start_job(agent), desk.start_job(agent)
    desk.end_job(over)
    desk.end(agent)
    (command,) = desk.unit.inbox(desk.run(root))
    assert stop.read_ending(command.payload).job_ids == (still_open,)


def test_other_runs_of_the_conversation_do_not_take_the_notices_of_a_delegated_run(desk: Desk, root: str) -> None:
    agent = desk.delegate(desk.take(desk.start_job(root)))
    desk.commit(root, state=RunState.COMPLETED)
    first, second = desk.start_job(agent), desk.start_job(agent)
    desk.end_job(first)
    desk.enter(agent)
    desk.end_job(second)
    for state in (RunState.COMPLETED, RunState.FAILED):
        other = desk.start_run()
        assert desk.enter(other) == ()
        desk.end(other, state)
    assert [(each.run_id, each.entered_by) for each in desk.background.notices] == [(first, agent), (second, "")]
    assert desk.turns == []


def test_jobs_of_a_delegated_run_count_toward_the_limit_of_its_conversation(desk: Desk, root: str, agent: str) -> None:
    """ASYNC-7"""
    for _ in range(OPEN_MAX // 2):
        desk.start_job(root)
        desk.start_job(agent)
    assert desk.background.open_jobs_of(USER) == OPEN_MAX
    with pytest.raises(IllegalTransition, match="10 open jobs"):
        desk.start_job(agent)


def test_the_model_of_a_delegated_run_can_only_stop_jobs_that_the_run_started(
    desk: Desk, root: str, agent: str
) -> None:
    own, other = desk.start_job(agent), desk.start_job(root)
    cancel, own_conversation = Cancel(cause=StopCause.MODEL), desk.run(agent).conversation_id
    for job, outcome in ((own, ""), (other, "RUN_NOT_FOUND")):
        assert desk.send(job, cancel, reports_to=own_conversation, started_by=RunId(agent)).reason == outcome
    assert desk.send(agent, cancel, reports_to=own_conversation, started_by=RunId(root)).reason == "RUN_NOT_FOUND"
    assert desk.unit.runs.get(RunKey(STORE, RunId(own))) is not None


@pytest.mark.parametrize("is_below_job", [True, False])
def test_stopping_a_job_also_stops_the_jobs_of_agents_below_it(desk: Desk, root: str, *, is_below_job: bool) -> None:
    """A cancelled run leaves its jobs running, but a stopped job does not."""
    stopped = desk.take(desk.start_job(root)) if is_below_job else root
    middle = desk.delegate(stopped)
    low = desk.delegate(middle)
    of_middle, of_low, of_root = desk.take(desk.start_job(middle)), desk.start_job(low), desk.start_job(root)
    for above in (stopped, middle):
        desk.cancel_calls(above)
    causes = {run_id: desk.run(run_id).stop_cause for run_id in (of_middle, of_low, of_root)}
    cause = StopCause.PARENT if is_below_job else None
    assert causes == {of_middle: cause, of_low: cause, of_root: None}
    if is_below_job:
        assert {desk.run(run_id).state for run_id in (of_middle, of_low)} == {RunState.CANCELLING}
        assert [command.payload for command in desk.unit.inbox(desk.run(of_middle))] == [b"cancel"]
        assert desk.unit.wakeups.rows[-1].run.run_id == low


def test_the_delegated_run_that_started_a_job_is_notified_if_another_model_stops_it(
    desk: Desk, root: str, agent: str
) -> None:
    """ASYNC-5: the model that stopped a job is not notified of its end, but another model is."""
    by_root, by_agent, after = (desk.take(desk.start_job(agent)) for _ in range(3))
    cancel, conversation = Cancel(cause=StopCause.MODEL), desk.conversation.conversation_id
    desk.send(by_root, cancel, reports_to=conversation, started_by=RunId(root))
    desk.send(by_agent, cancel, reports_to=desk.run(agent).conversation_id, started_by=RunId(agent))
    for job in (by_root, by_agent):
        desk.commit(job, state=RunState.CANCELLED, stop_cause=StopCause.MODEL, consumed=desk.unread(job))
    assert [each.run_id for each in desk.enter(agent)] == [by_root]
    desk.answer(agent)
    desk.send(after, cancel, reports_to=conversation, started_by=RunId(root))
    desk.commit(after, state=RunState.CANCELLED, stop_cause=StopCause.MODEL, consumed=desk.unread(after))
    assert desk.background == Background()


# Jobs, notices and turns in the ledger (ASYNC-5 to ASYNC-7).


def test_the_end_of_a_job_starts_one_turn_that_reports_it(desk: Desk, job: str) -> None:
    assert desk.background.open_jobs_of(USER) == 1
    desk.end_job(job)
    (turn,) = desk.turns
    assert (desk.active, turn.generation, turn.claim_at, turn.queued_message) == (turn, 1, desk.now, None)
    desk.take(turn.run_id)
    assert desk.enter(turn.run_id) == (Entered(run_id=RunId(job), occasion=0),)
    desk.end(turn.run_id)
    assert desk.background == Background(turn_times=(TurnTime(user_id=USER, time=turn.create_time),))
    assert desk.active is None


def test_a_report_waits_for_the_next_message_where_runs_are_switched_off(desk: Desk, job: str) -> None:
    desk.unit.off = lambda store_id: {Feature.RUNS} if store_id == STORE else ()
    desk.end_job(job)
    assert (desk.turns, desk.background.pending) == ([], 1)
    desk.unit.off = lambda _: ()
    assert desk.enter(desk.start_run()) == (Entered(run_id=RunId(job), occasion=0),)


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


def test_a_turn_does_not_inherit_its_jobs_top_ups(desk: Desk, job: str) -> None:
    desk.unit.put_run(replace(desk.run(job), token_budget=100))
    for tokens in (30, 20):
        desk.send(job, TopUp(tokens=tokens))
    desk.commit(desk.take(job), consumed=desk.unread(job))
    desk.end_job(job)
    assert (desk.run(job).token_budget, desk.turns[0].token_budget) == (150, 100)


def test_an_unstarted_turn_does_not_use_a_store_queue_slot(desk: Desk, job: str) -> None:
    desk.end_job(job)
    (turn,) = desk.turns
    assert (turn.is_queued, desk.queue) == (True, (0, 0))
    desk.end(desk.take(turn.run_id))
    assert desk.queue == (0, 0)


def test_a_notice_that_may_not_start_a_turn_does_not_block_others(desk: Desk, job: str) -> None:
    """After five generations a notice waits for the user. A job of the user's run is a first generation again."""
    desk.unit.put_run(replace(desk.run(job), generation=GENERATIONS_MAX))
    desk.end_job(job)
    assert desk.turns == []
    run_id = desk.start_run()
    desk.end_job(desk.start_job(run_id))
    desk.end(run_id)
    (turn,) = desk.turns
    assert turn.generation == 1


def test_a_notice_whose_token_budget_is_used_up_does_not_block_others() -> None:
    desk, turn = desk_with_a_turn()
    poor, rich = desk.start_job(turn), desk.start_job(turn)
    for job in (poor, rich):
        desk.end_job(job)
    desk.unit.put_run(replace(desk.run(poor), budget_run_id=RunId("run_poor")))
    background = replace(desk.background, used_up_budgets=(RunId("run_poor"),))
    desk.unit.put_conversation(replace(desk.conversation, background=background))
    desk.end(turn)
    assert [each.run_id for each in desk.turns] == [turn, desk.active and desk.active.run_id]


def test_a_failed_turn_is_repeated_until_it_has_failed_three_times() -> None:
    desk, turn = desk_with_a_turn()
    for count in (2, 3):
        desk.end(turn, RunState.FAILED)
        assert len(desk.turns) == count
        turn = desk.take(desk.turns[-1].run_id)
    desk.end(turn, RunState.FAILED)
    assert (len(desk.turns), desk.active) == (TRIES_MAX, None)


def test_stopping_a_turn_dismisses_the_notices_that_it_has_not_read(desk: Desk, job: str) -> None:
    desk.end_job(job)
    desk.cancel(desk.turns[0].run_id)
    assert (len(desk.turns), desk.background.notices) == (1, ())


def test_a_message_with_reject_is_refused_if_another_waits_behind_a_turn() -> None:
    desk, _ = desk_with_a_turn()
    desk.submit(MessagePolicy.REJECT)
    with pytest.raises(ConversationBusy):
        desk.submit(MessagePolicy.REJECT)


@pytest.mark.parametrize(
    ("policy", "is_first"),
    [*((each, False) for each in MessagePolicy), (MessagePolicy.QUEUE, True), (MessagePolicy.STEER, True)],
)
def test_a_quarantined_turn_does_not_block_messages(policy: MessagePolicy, *, is_first: bool) -> None:
    """The turn is quarantined for an operator, but the user need not wait for the operator."""
    desk, turn = desk_with_a_turn()
    submitted = desk.submit(policy) if is_first else None
    desk.apply(ReportCrash(run=desk.run(turn).key, epoch=desk.run(turn).epoch, crashes_max=1))
    submitted = submitted or desk.submit(policy)
    stopped = desk.run(turn)
    assert (stopped.state, stopped.stop_cause) == (RunState.CANCELLING, StopCause.SUPERSEDED)
    assert stopped.claim_at is not None, "a worker ends it"
    assert submitted.run.run_id in desk.conversation.queue


@for_each(
    ("state", "left"),
    [
        (CallState.RUNNING, CallState.OUTCOME_UNKNOWN),
        (CallState.RUNNABLE, CallState.CANCELLED),
    ],
)
def test_a_crashed_turn_that_is_being_stopped_ends_for_a_waiting_message(state: Any, left: Any) -> None:
    """No operator is needed: open calls get a result, and the waiting message becomes active."""
    desk, turn = desk_with_a_turn()
    desk.commit(turn, calls=(change("open", state),))
    asked = desk.submit(MessagePolicy.INTERRUPT).run.run_id
    crash = ReportCrash(run=desk.run(turn).key, epoch=desk.run(turn).epoch, crashes_max=1, lost=b"lost")
    assert desk.apply(crash) is False
    settled = desk.call("open")
    assert (desk.run(turn).state, settled.state, settled.result) == (RunState.CANCELLED, left, b"lost")
    assert desk.active == desk.run(asked)
