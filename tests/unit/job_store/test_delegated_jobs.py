"""Jobs of delegated runs: their notices enter the nearest run above that has not ended (ASYNC-5)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import IllegalTransition
from pawl.job_store.ledger.rules import stop
from pawl.job_store.ledger.rules.background import Background, Notice, OpenJob
from pawl.job_store.ledger.rules.command import Cancel
from pawl.job_store.ledger.rules.jobs import OPEN_MAX, Entered
from pawl.values import RunState, StopCause
from tests.unit.job_store.desk import Desk
from tests.unit.job_store.world import STORE, USER

AGENTS = ("a", "b", "c")
ROOT = RunId("root")


class Ended(msgspec.Struct, frozen=True):
    agent: str
    is_answered: bool


class Took(msgspec.Struct, frozen=True):
    """A run's model call received the notices for it."""

    agent: str


STEPS = st.lists(
    st.one_of(
        st.builds(Took, st.sampled_from(("", *AGENTS))),
        st.builds(Ended, st.sampled_from(AGENTS), st.booleans()),
    ),
    max_size=12,
)


def above(depth: int) -> tuple[RunId, ...]:
    return (*map(RunId, AGENTS[len(AGENTS) - depth :]), ROOT) if depth else ()


def took(background: Background, agent: str) -> Background:
    taken = background.pending_of(USER, RunId(agent))
    by = RunId(agent or ROOT)
    notices = tuple(replace(each, entered_by=by) if each in taken else each for each in background.notices)
    return replace(background, notices=notices)


@given(depths=st.lists(st.integers(0, len(AGENTS)), max_size=5), steps=STEPS)
def test_each_notice_is_for_the_nearest_run_that_has_not_ended(depths: list[int], steps: list[Ended | Took]) -> None:
    """It is answered once: it leaves only with a run that received and answered it."""
    notices = (Notice(run_id=RunId(f"j{n}"), user_id=USER, occasion=0, above=above(d)) for n, d in enumerate(depths))
    jobs = (OpenJob(run_id=RunId(f"o{n}"), user_id=USER, above=above(d)) for n, d in enumerate(depths))
    background = Background(notices=tuple(notices), open_jobs=tuple(jobs))
    ended: set[str] = set()
    holders: dict[str, str] = {}
    answered: set[str] = set()
    for step in steps:
        if step.agent in ended:
            continue
        if isinstance(step, Took):
            holders |= {each.run_id: step.agent for each in background.pending_of(USER, RunId(step.agent))}
            background = took(background, step.agent)
            continue
        own = {job_id for job_id, holder in holders.items() if holder == step.agent}
        holders = {job_id: holder for job_id, holder in holders.items() if holder != step.agent}
        answered |= own if step.is_answered else set()
        ended.add(step.agent)
        background = background.passed_on({step.agent}, RunId(step.agent if step.is_answered else ""))
    assert {each.run_id for each in background.notices} == {f"j{n}" for n in range(len(depths))} - answered
    for each in (*background.notices, *background.open_jobs):
        nearest = [run_id for run_id in above(depths[int(each.run_id[1:])])[:-1] if run_id not in ended]
        assert each.receiver == (nearest[0] if nearest else "")
    for notice in background.notices:
        holder = holders.get(notice.run_id)
        assert notice.entered_by == ("" if holder is None else holder or ROOT)


@given(entered=st.integers(0, 3), pending=st.booleans(), is_open=st.booleans())
def test_a_run_that_failed_passes_on_only_what_is_not_outdated(*, entered: int, pending: bool, is_open: bool) -> None:
    """Of a job's iterations one notice waits at most, and none that it had received waits behind the end."""
    job: dict[str, Any] = {"run_id": RunId("j"), "user_id": USER, "above": above(3)}
    notices = [Notice(**job, occasion=number, entered_by=RunId("a")) for number in range(1, entered + 1)]
    notices += [Notice(**job, occasion=9)] if pending else []
    notices += [] if is_open else [Notice(**job, occasion=0)]
    open_jobs = (OpenJob(**job),) if is_open else ()
    passed = Background(notices=tuple(notices), open_jobs=open_jobs).passed_on({"a"})
    expected = [9] if pending else [entered] if entered and is_open else []
    assert [each.occasion for each in passed.notices] == expected + ([] if is_open else [0])


def test_a_delegated_run_receives_the_end_of_its_job() -> None:
    desk = Desk()
    root = desk.start_run()
    agent = desk.delegate(root)
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
def test_the_next_run_above_receives_what_a_delegated_run_has_not(state: RunState) -> None:
    desk = Desk()
    root = desk.start_run()
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
def test_a_job_and_its_delegated_run_that_end_together_start_one_turn(*, is_job_first: bool) -> None:
    """The root run has ended, because the delegated run belongs to a job."""
    desk = Desk()
    root = desk.start_run()
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


def test_a_run_that_ended_before_its_agent_receives_nothing() -> None:
    """A cancelled run does not wait for the runs below it."""
    desk = Desk()
    root = desk.start_run()
    middle = desk.delegate(root)
    low = desk.delegate(middle)
    job = desk.start_job(low)
    desk.unit.put_run(replace(desk.run(middle), state=RunState.CANCELLED))
    desk.end_job(job)
    desk.end(low)
    assert [each.run_id for each in desk.enter(root)] == [job]


@pytest.mark.parametrize("is_below_job", [True, False])
def test_a_job_that_starts_below_a_cancelled_run_is_cancelled_and_reports_nothing(*, is_below_job: bool) -> None:
    """I12: the cancellation reaches the runs below only with the next step of each run above."""
    desk = Desk()
    root = desk.start_run()
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


def test_the_end_of_a_delegated_run_names_its_open_jobs() -> None:
    desk = Desk()
    root = desk.start_run()
    agent = desk.delegate(root)
    over, still_open = desk.start_job(agent), desk.start_job(agent)
    desk.end_job(over)
    desk.end(agent)
    (command,) = desk.unit.inbox(desk.run(root))
    assert stop.read_ending(command.payload).job_ids == (still_open,)


def test_other_runs_of_the_conversation_keep_the_notices_of_a_delegated_run() -> None:
    desk = Desk()
    root = desk.start_run()
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


def test_a_delegated_run_starts_at_most_as_many_jobs_as_its_conversation_has_left() -> None:
    """ASYNC-7"""
    desk = Desk()
    root = desk.start_run()
    agent = desk.delegate(root)
    for _ in range(OPEN_MAX // 2):
        desk.start_job(root)
        desk.start_job(agent)
    assert desk.background.open_jobs_of(USER) == OPEN_MAX
    with pytest.raises(IllegalTransition, match="10 open jobs"):
        desk.start_job(agent)


def test_a_delegated_runs_model_stops_only_jobs_that_it_started() -> None:
    desk = Desk()
    root = desk.start_run()
    agent = desk.delegate(root)
    own, other = desk.start_job(agent), desk.start_job(root)
    cancel, own_conversation = Cancel(cause=StopCause.MODEL), desk.run(agent).conversation_id
    for job, outcome in ((own, ""), (other, "RUN_NOT_FOUND")):
        receipt = desk.send(job, cancel, reports_to=own_conversation, started_by=RunId(agent))
        assert receipt.reason == outcome
    assert desk.send(agent, cancel, reports_to=own_conversation, started_by=RunId(root)).reason == "RUN_NOT_FOUND"
    assert desk.unit.runs.get(RunKey(STORE, RunId(own))) is not None


@pytest.mark.parametrize("is_below_job", [True, False])
def test_stop_of_a_job_also_stops_the_jobs_of_the_agents_below_it(*, is_below_job: bool) -> None:
    """A cancelled run leaves its jobs running, but a stopped job does not."""
    desk = Desk()
    root = desk.start_run()
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


def test_stop_by_the_model_is_reported_to_the_delegated_run_whose_job_it_is() -> None:
    """ASYNC-5: the model that stopped a job is not notified of its end, but another model is."""
    desk = Desk()
    root = desk.start_run()
    agent = desk.delegate(root)
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
