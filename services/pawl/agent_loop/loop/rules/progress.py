"""Decides when a job with a single call reports its progress, and estimates when a job ends."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.fact import ToolProgress
from pawl.agent_loop.loop.rules.loop_state import JobCursor
from pawl.agent_loop.loop.rules.monitor import has_passed
from pawl.agent_loop.loop.rules.run import Job, JobProgress
from pawl.values import JobReports

# Minimum time between two progress reports to the conversation.
REPORT_DISTANCE_SECONDS: Final = 60.0
# In later attempts at a call, checkpoints do not count as progress. Otherwise, a call that stores a checkpoint and then
# kills its worker would never be quarantined.
CHECKPOINT_ATTEMPTS_MAX: Final = 20
# A smaller fraction says too little about the total duration.
_FRACTION_MIN: Final = 0.01
_ROUNDING: Final = 1e-9


def report_time(
    job: Job, cursor: JobCursor, progress: JobProgress | None, start_time: float, now: float
) -> float | None:
    """Return when to report the progress of a call that started at `start_time`.

    The time may be in the past. It is at least a minute after the last report. None means that the call must make
    progress first.
    """
    if job.reports is not JobReports.PROGRESS or job.interval_seconds:
        return None
    if job.report_seconds:
        return (cursor.progress_told_time or start_time) + job.report_seconds
    if _percent_passed(job, progress) <= cursor.percent_told:
        return None
    if has_passed(cursor.progress_told_time, now, REPORT_DISTANCE_SECONDS):
        return now
    return cursor.progress_told_time + REPORT_DISTANCE_SECONDS


def reported(job: Job, cursor: JobCursor, progress: JobProgress | None, now: float) -> JobCursor:
    """Record that progress was reported at `now`.

    All thresholds passed so far count as reported, even after a restart.
    """
    return replace(
        cursor,
        percent_told=max(cursor.percent_told, _percent_passed(job, progress)),
        progress_told_time=now,
        progress_reports=cursor.progress_reports + 1,
    )


def advanced(cursor: JobCursor, report: ToolProgress, attempt: int) -> JobCursor:
    """Count a report as progress if the call has stored a checkpoint or has gone further than before.

    After a restart, a call makes no progress until it passes the point that it had reached before.
    """
    fraction = report.fraction or 0.0
    has_checkpoint = report.has_checkpoint and attempt <= CHECKPOINT_ATTEMPTS_MAX
    if not has_checkpoint and fraction <= cursor.fraction_max:
        return cursor
    return replace(cursor, fraction_max=max(cursor.fraction_max, fraction), advances=cursor.advances + 1)


def expected_end(job: Job, progress: JobProgress | None) -> float | None:
    """Return when the job is expected to end, or None if unknown. For a series, this is the latest possible time."""
    if job.interval_seconds:
        last = job.begin_time + job.interval_seconds * (job.iterations_max - 1 + job.delay_first)
        return last if job.end_time is None else min(last, job.end_time)
    if progress is not None and progress.fraction is not None and progress.fraction >= _FRACTION_MIN:
        return progress.start_time + max(0.0, progress.time - progress.start_time) / progress.fraction
    return job.begin_time + job.estimated_minutes * 60 if job.estimated_minutes else None


def _percent_passed(job: Job, progress: JobProgress | None) -> int:
    """Return the largest threshold that the call has passed, or 0 if it has passed none."""
    if progress is None or progress.fraction is None:
        return 0
    percent = progress.fraction * 100 + _ROUNDING
    return max((each for each in job.report_percents if each <= percent), default=0)
