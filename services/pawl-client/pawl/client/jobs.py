"""Client methods for background jobs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from pawl.agent.v1 import conversation_pb2
from pawl.agent.v1 import jobs_pb2 as pb
from pawl.chassis import job_reports, strict_json
from pawl.client.forms import natural
from pawl.client.streams import responses
from pawl.client.target import Target
from pawl.errors import InvalidField
from pawl.event.v1 import run_pb2
from pawl.tool.v1 import completion_pb2

_KINDS: Final = {
    "path": "pointer",
    "below": "below",
    "above": "above",
    "equals": "equals_json",
    "changed": "changed",
    "cel": "expression",
}
_LIMITS: Final = {"pause": "pause_seconds", "times": "firings_max", "for": "hold_seconds"}


def condition(given: str | Mapping[str, Any], field: str = "until") -> run_pb2.JobCondition:
    """Return a job condition from a CEL expression or a mapping.

    A mapping looks like `{"path": "/price", "below": 20}`. Instead of `below`, it can have `above`, `equals`,
    `"changed": True` or `cel`.

    Raises:
        InvalidField: The condition is invalid. The error names `field`.
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
        raise InvalidField("a condition's `pause`, `times` and `for` must be numbers", field="when") from None


def _reports(given: str | Mapping[str, float | Sequence[int]]) -> dict[str, Any]:
    """Return a request's report fields for a value of `reports`, such as `"change"` or `{"every": 10}`."""
    fields = job_reports.read(given) if given else {"reports": "UNSPECIFIED"}
    return fields | {"reports": f"JOB_REPORTS_{fields['reports']}"}


class JobHandle:
    """A background job as it was last read. It has the fields of BackgroundJob, and methods that control the job.

    If the job comes from an `AsyncClient`, its methods must be awaited.
    """

    def __init__(self, client: Any, message: pb.BackgroundJob) -> None:
        self.client = client
        self.message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)

    def stop(self, reason: str = "") -> Any:
        return self.client.stop_job(self.message.job_id, reason)

    def pause(self) -> Any:
        return self.client.pause_job(self.message.job_id)

    def resume(self) -> Any:
        return self.client.resume_job(self.message.job_id)

    def result(self) -> Any:
        return self.client.result(self.message.job_id)


class JobVerbs(Target):
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
        reports: str | Mapping[str, float | Sequence[int]] = "",
        until: str | Mapping[str, Any] | None = None,
        when: str | Mapping[str, Any] | None = None,
        failures_told: int = 0,
        request_id: str = "",
    ) -> JobHandle:
        """Start a job and return it. Pawl reports its results to the given conversation, or to a new one.

        With an interval, the call is repeated. For `until` and `when`, see `condition` and `monitor`. `reports` is a
        word such as `"change"`, or `{"every": 10}`. For a job without an interval, use `{"progress": [25, 50, 75]}`
        (percent) or `{"minutes": 10}` to report progress.
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
        return JobHandle(self, (await self.once(self.jobs.StartJob, request)).job)

    async def list_jobs(self, conversation_id: str = "", *, open_only: bool = False) -> AsyncGenerator[JobHandle, None]:
        """Yield your jobs, newest first. With `conversation_id`, yield only jobs that report to that conversation."""
        request = pb.ListJobsRequest(conversation_id=conversation_id, open_only=open_only)
        async for page in self.pages(self.jobs.ListJobs, request):
            for job in page.jobs:
                yield JobHandle(self, job)

    async def get_job(self, job_id: str) -> JobHandle:
        """Return a job with its pending calls."""
        return JobHandle(self, (await self.again(self.jobs.GetJob, pb.GetJobRequest(job_id=job_id))).job)

    async def stop_job(self, job_id: str, reason: str = "", *, request_id: str = "") -> pb.BackgroundJob:
        """Stop a job and return it. A job that has ended does not change."""
        request = pb.StopJobRequest(job_id=job_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJob, request)).job

    async def pause_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Pause a job and return it. Running iterations finish, but no new iteration starts during the pause."""
        return (await self.once(self.jobs.PauseJob, pb.PauseJobRequest(job_id=job_id, request_id=request_id))).job

    async def resume_job(self, job_id: str, *, request_id: str = "") -> pb.BackgroundJob:
        """Resume a paused job on its original schedule, and return it. Missed iterations are skipped."""
        return (await self.once(self.jobs.ResumeJob, pb.ResumeJobRequest(job_id=job_id, request_id=request_id))).job

    async def stop_jobs(
        self, conversation_id: str, reason: str = "", *, request_id: str = ""
    ) -> Sequence[pb.BackgroundJob]:
        """Stop all of a conversation's open jobs. Return the stopped jobs, newest first."""
        request = pb.StopJobsRequest(conversation_id=conversation_id, reason=reason, request_id=request_id)
        return (await self.once(self.jobs.StopJobs, request)).jobs

    async def complete_call(self, token: str, result: Any = None, *, error: str = "") -> bool:
        """Complete a call by its completion token, with a JSON value or an error.

        Return True if this was a duplicate.
        """
        request = completion_pb2.CompleteCallRequest(token=token, error=error)
        if not error:
            request.result_json = strict_json.dumps_canonical(result)
        return (await self.again(self.completions.CompleteCall, request)).duplicate

    async def follow(
        self, conversation_id: str, after: str = ""
    ) -> AsyncGenerator[conversation_pb2.WatchConversationResponse, None]:
        """Yield a conversation's current content, then each change as it happens. Never ends.

        Items are the conversation, messages, your runs and your jobs. `events` has the events of your active run. If
        the connection is lost, the stream continues with any replica. Each message and event is yielded once, but a run
        or job may be yielded again. To continue in another process, pass the last response's `cursor` as `after`.

        Raises:
            ConversationNotFound, ConversationErased, Unauthenticated: You cannot read the conversation. This is also
                raised later if you lose access.
            InvalidField: `after` is not a cursor of this conversation and user.
            SeqBeyondEnd: The position no longer exists, for example because Pawl was restored from a backup. Discard
                what you have, and call this again without `after`.
        """

        def open_stream() -> Any:
            request = conversation_pb2.WatchConversationRequest(conversation_id=conversation_id, after=after)
            return self.conversations.WatchConversation(request)

        async with aclosing(responses(open_stream, ends=False, retry_seconds=self.retry_seconds)) as stream:
            async for response in stream:
                if response.cursor:  # Otherwise, it is a heartbeat.
                    after = response.cursor
                    yield response
