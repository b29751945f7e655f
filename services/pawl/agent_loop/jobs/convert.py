"""Converts requests and responses about users' jobs."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import jobs_pb2
from pawl.agent_loop.api.convert import WIRE
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import checks, progress
from pawl.agent_loop.loop.rules.assembly import ARGUMENTS_BYTES_MAX
from pawl.agent_loop.loop.rules.background import RequestedJob
from pawl.agent_loop.loop.rules.condition import Condition
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX
from pawl.agent_loop.loop.rules.run import JobProgress, Monitor
from pawl.chassis.ids import check_agent_name, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.rpc.translate import Exceptions, timestamp
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2
from pawl.values import ENDED, JobReports

_SETTLED: Final = frozenset(
    {
        *(call_pb2.CALL_STATE_SUCCEEDED, call_pb2.CALL_STATE_FAILED, call_pb2.CALL_STATE_REJECTED),
        *(call_pb2.CALL_STATE_EXPIRED, call_pb2.CALL_STATE_CANCELLED, call_pb2.CALL_STATE_OUTCOME_UNKNOWN),
    }
)
_PROGRESS: Final = WIRE.struct(JobProgress, run_pb2.JobProgress)
_REPORTS: Final = WIRE.enum(JobReports, run_pb2.JobReports, field="reports")


class _Error(msgspec.Struct, frozen=True):
    error: str


def _reports(request: Any) -> JobReports | None:
    return _REPORTS.read(request.reports) if request.reports else None


WIRE.struct(Condition, run_pb2.JobCondition)
WIRE.struct(Monitor, run_pb2.JobMonitor)
_ASKED: Final = WIRE.struct(
    RequestedJob,
    jobs_pb2.StartJobRequest,
    Exceptions(of_message=("request_id",), read={"reports": _reports}, unwritten=("reports",)),
)


def requested_job(request: jobs_pb2.StartJobRequest) -> tuple[RequestedJob, bytes]:
    """Return the requested job and the request's digest.

    Raises:
        InvalidField, InvalidId, TooLarge
    """
    check_id(request.conversation_id, "conversation_id", optional=True)
    check_agent_name(request.agent, "agent", optional=True)
    checks.conversation_key(request.conversation_key)
    check_labels(request.labels)
    if not request.tool_name or len(request.tool_name) > NAME_CHARACTERS_MAX or not request.tool_name.isprintable():
        raise InvalidField(f"tool_name must have 1 to {NAME_CHARACTERS_MAX} printable characters", field="tool_name")
    if len(request.arguments_json) > ARGUMENTS_BYTES_MAX:
        raise TooLarge(f"arguments_json must be at most {ARGUMENTS_BYTES_MAX} bytes", field="arguments_json")
    try:
        request.arguments_json.decode()
    except UnicodeDecodeError:
        raise InvalidField("arguments_json must be JSON encoded as UTF-8", field="arguments_json") from None
    copy = jobs_pb2.StartJobRequest()
    copy.CopyFrom(request)
    copy.ClearField("request_id")
    return _ASKED.read(request), hashlib.sha256(copy.SerializeToString(deterministic=True)).digest()


def job(run: run_pb2.Run) -> jobs_pb2.BackgroundJob:
    """Return the job. If its run is open, include the time at which it is expected to end."""
    # The calls of a workflow are its nodes, not iterations.
    counts = () if run.HasField("workflow") else run.call_counts
    ended = {count.state: count.count for count in counts if count.state in _SETTLED}
    end = _expected_end(run)
    waits_for_time = run.waiting.reason == waiting_pb2.WAIT_REASON_TIME and run.waiting.HasField("deadline_time")
    return jobs_pb2.BackgroundJob(
        job_id=run.run_id,
        conversation_id=run.reports_to_conversation_id,
        parent_run_id=run.parent_run_id,
        parent_call_id=run.parent_call_id,
        definition=run.job,
        state=run.state,
        iterations=run.trimmed_rounds + sum(ended.values()),
        failures=run.trimmed_failures + sum(ended.values()) - ended.get(call_pb2.CALL_STATE_SUCCEEDED, 0),
        create_time=run.create_time,
        end_time=run.end_time if run.HasField("end_time") else None,
        next_time=run.waiting.deadline_time if waits_for_time else None,
        last_result=run.output_text,
        failure=run.failure if run.HasField("failure") else None,
        stop_cause=run.stop_cause,
        waiting=run.waiting if run.HasField("waiting") else None,
        pending_calls=run.pending_calls,
        trimmed_iterations=run.trimmed_rounds,
        missed_iterations=run.missed_iterations,
        progress=run.job_progress if run.HasField("job_progress") else None,
        expected_end_time=None if end is None else Timestamp(**timestamp(end)),
        not_stopped=_not_stopped(run),
    )


def _expected_end(run: run_pb2.Run) -> float | None:
    if run.state in ENDED or run.state == run_pb2.RUN_STATE_CANCELLING:
        return None
    latest = _PROGRESS.read(run.job_progress) if run.HasField("job_progress") else None
    return progress.expected_end(wire.JOB.read(run.job), latest)


def _not_stopped(run: run_pb2.Run) -> str:
    """Return why the job's call could not be stopped, or an empty string if no call is left running.

    The reason is the error in the job's output.
    """
    if not run.unstopped_call_ids:
        return ""
    try:
        return msgspec.json.decode(run.output_text, type=_Error).error
    except msgspec.DecodeError:
        return "The job's call could not be stopped and may still be running."
