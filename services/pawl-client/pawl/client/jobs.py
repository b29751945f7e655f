"""Client methods for background jobs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1 import jobs_pb2 as pb
from pawl.chassis import job_reports, strict_json
from pawl.client.forms import natural
from pawl.client.target import Target
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.tool.v1 import completion_pb2

_OPEN: Final = (
    run_pb2.RUN_STATE_QUEUED,
    run_pb2.RUN_STATE_RUNNING,
    run_pb2.RUN_STATE_WAITING,
    run_pb2.RUN_STATE_CANCELLING,
    run_pb2.RUN_STATE_NEEDS_ATTENTION,
)
_KINDS: Final = {
    "path": "pointer",
    "below": "below",
    "above": "above",
    "equals": "equals_json",
    "changed": "changed",
    "cel": "expression",
}
_LIMITS: Final = {"pause": "pause_seconds", "times": "firings_max", "for": "hold_seconds"}
_POLL_SECONDS: Final = 1.0
# A run can become visible after a run that was created later.
_LATE_MICROSECONDS: Final = 10_000_000


def condition(given: str | Mapping[str, Any], field: str = "until") -> run_pb2.JobCondition:
    """Return a job condition from a CEL expression or a mapping.

    A mapping looks like `{"path": "/price", "below": 20}`, or has `above`, `equals`, `"changed": True` or `cel`
    instead.

    Raises:
        InvalidField: The condition is invalid; the error names `field`.
    """
    named = dict(given) if isinstance(given, Mapping) else {"cel": given}
    found = run_pb2.JobCondition()
    try:
        if named in ({}, {"cel": ""}):
            raise ValueError
        for kind, value in named.items():
            wanted = json.dumps(value).encode() if kind == "equals" else value
            setattr(found, _KINDS[kind], wanted)
    except (KeyError, TypeError, ValueError):
        message = "a condition must be CEL, or have one of below, above, equals, changed and cel, with an optional path"
        raise InvalidField(message, field=field) from None
    return found


def monitor(given: str | Mapping[str, Any]) -> run_pb2.JobMonitor:
    """Return a monitor, which reports each time a condition becomes true.

    A mapping is a condition that can also have `pause` and `for` (both in seconds) and `times`.

    Raises:
        InvalidField: The monitor is invalid.
    """
    named = dict(given) if isinstance(given, Mapping) else {"cel": given}
    limits: dict[str, Any] = {field: named.pop(name) for name, field in _LIMITS.items() if name in named}
    try:
        return run_pb2.JobMonitor(condition=condition(named, "when"), **limits)
    except (TypeError, ValueError):
        raise InvalidField(f"{', '.join(_LIMITS)} of a condition must be numbers", field="when") from None


def _reports(given: str | Mapping[str, float]) -> dict[str, Any]:
    """Return a request's report fields for `reports`, such as `"change"` or `{"every": 10}`."""
    fields = job_reports.read(given) if given else {"reports": "UNSPECIFIED"}
    return fields | {"reports": f"JOB_REPORTS_{fields['reports']}"}


class JobVerbs(Target):
    """Methods for background jobs."""

    async def start_job(
        self,
        tool_name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        conversation_id: str = "",
        conversation_key: str = "",
        agent: str = "",
        labels: Mapping[str, str] | None = None,
        interval_seconds: float = 0.0,
        iterations_max: int = 0,
        duration_minutes: float = 0.0,
        delay_first: bool = False,
        estimated_minutes: float = 0.0,
        reports: str | Mapping[str, float] = "",
        until: str | Mapping[str, Any] | None = None,
        when: str | Mapping[str, Any] | None = None,
        failures_told: int = 0,
        request_id: str = "",
    ) -> pb.BackgroundJob:
        """Start a job and return it. Its results are reported to the given conversation, or to a new one.

        With an interval, the call is repeated. For `until` and `when`, see `condition` and `monitor`. `reports`
        is a word such as `"change"`, or `{"every": 10}`.
        """
        request = pb.StartJobRequest(
            tool_name=tool_name,
            arguments_json=json.dumps(dict(arguments or {})).encode(),
            conversation_id=conversation_id,
            conversation_key=conversation_key,
            agent=agent,
            labels=labels,
            interval_seconds=interval_seconds,
            iterations_max=natural(iterations_max, "iterations_max"),
            duration_minutes=duration_minutes,
            delay_first=delay_first,
            estimated_minutes=estimated_minutes,
            until=None if until is None else condition(until),
            when=None if when is None else monitor(when),
            failures_told=natural(failures_told, "failures_told"),
            request_id=request_id,
            **_reports(reports),
        )
        return (await self.once(self.jobs.StartJob, request)).job

    async def list_jobs(
        self, conversation_id: str = "", *, open_only: bool = False
    ) -> AsyncGenerator[pb.BackgroundJob, None]:
        """Yield your jobs, newest first; with `conversation_id`, only those that report to that conversation."""
        request = pb.ListJobsRequest(conversation_id=conversation_id, open_only=open_only)
        async for page in self.pages(self.jobs.ListJobs, request):
            for job in page.jobs:
                yield job

    async def get_job(self, job_id: str) -> pb.BackgroundJob:
        """Return a job with its pending calls."""
        return (await self.again(self.jobs.GetJob, pb.GetJobRequest(job_id=job_id))).job

    async def stop_job(self, job_id: str, reason: str = "", *, request_id: str = "") -> pb.BackgroundJob:
        """Stop a job and return it. A job that has ended is unchanged."""
        request = pb.StopJobRequest(job_id=job_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJob, request)).job

    async def pause_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Pause a job and return it. Iterations do not start while it is paused, but a running one finishes."""
        return (await self.once(self.jobs.PauseJob, pb.PauseJobRequest(job_id=job_id, request_id=request_id))).job

    async def resume_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Resume a paused job on its original schedule, and return it. Missed iterations are skipped."""
        return (await self.once(self.jobs.ResumeJob, pb.ResumeJobRequest(job_id=job_id, request_id=request_id))).job

    async def stop_jobs(
        self, conversation_id: str, reason: str = "", *, request_id: str = ""
    ) -> Sequence[pb.BackgroundJob]:
        """Stop all of a conversation's open jobs; return the stopped ones, newest first."""
        request = pb.StopJobsRequest(conversation_id=conversation_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJobs, request)).jobs

    async def complete_call(self, token: str, result: Any = None, *, error: str = "") -> bool:
        """Complete a call by its completion token, with a JSON value or an error. Return True for a duplicate."""
        request = completion_pb2.CompleteCallRequest(token=token, error=error)
        if not error:
            request.result_json = strict_json.dumps_canonical(result)
        return (await self.again(self.completions.CompleteCall, request)).duplicate

    async def follow(self, conversation_id: str, from_run_id: str = "") -> AsyncGenerator[run_pb2.Run, None]:
        """Yield your open runs in a conversation, then new ones within seconds of their start, each once. Never ends.

        With `from_run_id`, it also yields ended runs, starting with that run, so that none is missed. Runs that were
        started to report background results are included.
        """
        if from_run_id:
            first = (await self.again(self.agents.GetRun, agent_pb2.GetRunRequest(run_id=from_run_id))).run
            before = last = first.create_time.ToMicroseconds() - 1
        else:
            newest = agent_pb2.ListRunsRequest(conversation_id=conversation_id, page_size=1)
            found = (await self.again(self.agents.ListRuns, newest)).runs
            before = last = found[0].create_time.ToMicroseconds() if found else 0
        request = agent_pb2.ListRunsRequest(conversation_id=conversation_id, order=agent_pb2.RUN_ORDER_OLDEST_FIRST)
        if from_run_id:
            request.create_time_from.FromMicroseconds(max(0, before))
        else:
            request.states.extend(_OPEN)
        seen = set[str]()
        while True:
            listed = set[str]()
            async for page in self.pages(self.agents.ListRuns, request):
                for run in page.runs:
                    listed.add(run.run_id)
                    created = run.create_time.ToMicroseconds()
                    last = max(last, created)
                    if run.run_id not in seen and (created > before or run.state in _OPEN):
                        yield run
            if not request.states:
                await asyncio.sleep(_POLL_SECONDS)
            seen = listed
            del request.states[:]
            request.create_time_from.FromMicroseconds(max(0, last - _LATE_MICROSECONDS))
