"""Lifecycle events of jobs: pauses and resumes, but not every iteration (NOTE-2)."""

from __future__ import annotations

from pawl.values import RunState, StopCause, WaitKind
from tests.unit.job_store.desk import Desk, desk_with_a_job

TIME, AGENT, APPROVAL, PAUSED = (
    {"state": RunState.WAITING, "waits": (kind,)}
    for kind in (WaitKind.TIME, WaitKind.AGENT, WaitKind.APPROVAL, WaitKind.PAUSED)
)
RUNNING = {"state": RunState.RUNNING}


def event_types(desk: Desk, run_id: str) -> list[str]:
    events = [event for event in desk.unit.events.rows if event.run_id == run_id]
    return [event.lifecycle_type for event in events if event.lifecycle_type]


def test_iterations_do_not_send_lifecycle_events() -> None:
    desk, job = desk_with_a_job()
    desk.take(job)
    for _ in range(50):
        for step in (TIME, RUNNING, AGENT, RUNNING):
            desk.commit(job, **step)
    desk.end(job)
    assert event_types(desk, job) == ["run.queued", "run.running", "run.completed"]


def test_a_job_that_waits_for_a_user_and_resumes_is_reported() -> None:
    """A notified user also learns that the need is over."""
    desk, job = desk_with_a_job()
    desk.take(job)
    for step in (TIME, APPROVAL, TIME, APPROVAL, RUNNING, TIME):
        desk.commit(job, **step)
    first_events = ["run.queued", "run.running"]
    assert event_types(desk, job) == [*first_events, "run.waiting", "run.waiting", "run.waiting", "run.running"]


def test_job_pauses_and_resumes_are_reported() -> None:
    desk, job = desk_with_a_job()
    desk.take(job)
    for step in (TIME, PAUSED, TIME, RUNNING, PAUSED, RUNNING, PAUSED):
        desk.commit(job, **step)
    desk.commit(job, state=RunState.CANCELLED, stop_cause=StopCause.USER)
    pauses = ["job.paused", "job.resumed", "job.paused", "job.resumed", "job.paused"]
    assert event_types(desk, job) == ["run.queued", "run.running", *pauses, "run.cancelled"]


def test_every_state_change_in_a_user_run_is_reported() -> None:
    desk, _ = desk_with_a_job()
    run_id = desk.start_run()
    for step in (TIME, RUNNING, AGENT, RUNNING):
        desk.commit(run_id, **step)
    assert event_types(desk, run_id)[-4:] == ["run.waiting", "run.running", "run.waiting", "run.running"]
