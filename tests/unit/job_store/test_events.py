"""Lifecycle events of jobs, but not of every iteration (NOTE-2), and content that events omit because of its size."""

from __future__ import annotations

from datetime import UTC, datetime

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.event.v1 import call_pb2
from pawl.job_store.ledger.rpc import messages
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.values import CallState, RunState, StopCause, WaitKind
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


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def settled(content: bytes, inverse_arguments: bytes) -> CallRow:
    inverse = call_pb2.Inverse(tool_name="back", arguments_json=inverse_arguments)
    result = call_pb2.CallResult(content_json=content, inverse=inverse)
    return CallRow(
        store_id=StoreId("store"),
        call_id=CallId("call_1"),
        run_id=RunId("run_1"),
        conversation_id=ConversationId("conv_1"),
        user_id=UserId("me"),
        round=1,
        index=0,
        state=CallState.SUCCEEDED,
        tool_name="write",
        tool_version=1,
        fallback_tool_name="",
        arguments=b"{}",
        attempt=1,
        digest="",
        decision=None,
        deadline_time=None,
        offer=None,
        reserved_by="",
        result=result.SerializeToString(),
        spec=b"",
        create_time=NOW,
        state_time=NOW,
        start_time=NOW,
        end_time=NOW,
    )


def test_a_result_and_its_inverse_are_omitted_if_together_too_large() -> None:
    for content, inverse in ((b"1" * 200, b"{}"), (b"1", b"2" * 200), (b"1" * 60, b"2" * 60)):
        row = settled(content, inverse)
        cut, whole = messages.call(row, result_bytes_max=100), messages.call(row)
        assert not cut.HasField("result")
        assert cut.result_omitted_bytes == len(content) + len(inverse)
        assert whole.result.inverse.arguments_json == inverse
