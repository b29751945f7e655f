"""Evaluates a job's iterations, and decides which of them to report (ASYNC-4, ASYNC-5)."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import text
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.condition import Condition
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.loop_state import Digested, JobCursor
from pawl.agent_loop.loop.rules.run import Job, Monitor
from pawl.values import CallState, JobReports

# Default number of consecutive failures after which a monitoring job reports them.
FAILURES_TOLD: Final = 3
# Maximum number of results in a digest; earlier ones are only counted.
DIGESTED_MAX: Final = 8
_DIGESTED_BYTES_MAX: Final = 200


def evaluated(job: Job, cursor: JobCursor, call: Call, result: str) -> JobCursor:
    failed = call.state is not CallState.SUCCEEDED
    after = replace(cursor, problem="")
    if not failed and (job.until is not None or job.when is not None):
        content = _content(call)
        after = _until(job.until, after, content)
        after = fired(job.when, after, content, call.end_time or 0.0)
        failed = bool(after.problem)
    after = replace(after, failures=after.failures + failed, failed_in_a_row=after.failed_in_a_row + 1 if failed else 0)
    return _digested(after, call.round, result) if job.reports is JobReports.DIGEST else after


def report_due(job: Job, before: JobCursor, after: JobCursor, call: Call, result: str) -> tuple[JobCursor, bool]:
    """Decide whether to report an iteration. Return the updated cursor and the decision."""
    if not job.interval_seconds or job.reports is JobReports.NONE:
        return after, False
    digest = hashlib.sha256(result.encode()).hexdigest()[:16]
    now = call.end_time or 0.0
    match job.reports:
        case JobReports.EVERY:
            is_due = call.round % max(1, job.report_iterations) == 0
        case JobReports.CHANGE:
            is_due = digest != before.told_sha256
        case JobReports.DIGEST:
            is_due = has_passed(before.digest_time or job.begin_time, now, job.report_seconds)
        case JobReports.END | JobReports.PROGRESS:
            is_due = False
    watches = job.until is not None or job.when is not None
    is_blind = watches and after.failed_in_a_row == (job.failures_told or FAILURES_TOLD)
    if not (is_due or is_blind or after.fired > before.fired):
        return after, False
    after = replace(after, told_sha256=digest)
    return (replace(after, digest=(), digest_left_out=0, digest_time=now) if is_due else after), True


def job_output(
    job: Job,
    before: JobCursor,
    after: JobCursor,
    result: str,
    output_before: str,
    *,
    paused: str = "",
    ends_digest: bool = False,
) -> str:
    """Return the job's output after an iteration that returned `result`. The output before it was `output_before`.

    `paused` is the reason why the job pauses, or empty if it does not. `ends_digest` is true if the job's digest is
    due.
    """
    outcome: dict[str, Any] = {"paused": paused} if paused else {}
    if job.until is not None:
        outcome["met"] = after.met
    if job.when is not None:
        outcome["fired"] = after.fired
        # Keep anything that may not have been delivered yet.
        previous = msgspec.json.decode(output_before, type=dict[str, msgspec.Raw]) if before.fired else {}
        if 0 < after.fired == before.fired:
            outcome["fired_with"] = previous.get("fired_with", previous["result"])
        if after.fired > before.fired and job.when.condition.changed and before.when_seen is not None:
            outcome["changed_from"] = "(too large)" if before.when_seen.is_too_large else before.when_seen.value
        elif "changed_from" in previous:
            outcome["changed_from"] = previous["changed_from"]
    if after.problem:
        outcome["condition_error"] = after.problem
    if job.reports is JobReports.DIGEST:
        outcome["iterations"] = [
            {"from": each.first_round, "to": each.last_round, "result": each.result} for each in after.digest
        ]
        outcome["left_out"] = after.digest_left_out
        if output_before and before.digest_time and not ends_digest:
            # Keep what may not have been delivered yet.
            previous = msgspec.json.decode(output_before, type=dict[str, msgspec.Raw])
            digest_before = previous.get("digest_before" if before.digest else "iterations")
            outcome |= {"digest_before": digest_before} if digest_before else {}
    if not outcome:
        return result
    return msgspec.json.encode(outcome | {"result": msgspec.Raw(result.encode())}).decode()


def is_over(job: Job, cursor: JobCursor) -> bool:
    """Return whether the job has met its `until` condition, or has reported `when` the maximum number of times."""
    return cursor.met or (job.when is not None and cursor.fired >= job.when.firings_max)


def fired(monitor: Monitor | None, cursor: JobCursor, content: Any, now: float) -> JobCursor:
    """Apply a result to the monitor.

    The monitor fires when its condition becomes true, but not while the condition remains true. Each firing starts a
    pause. If the condition becomes true during the pause and is still true afterwards, the monitor fires at the end of
    the pause. With a hold time, the condition must first have been true for that long. If the condition is a change,
    the new value must have stayed the same for that long. A condition that cannot be evaluated is neither true nor
    false.
    """
    if monitor is None:
        return cursor
    condition, before, seen = monitor.condition, cursor.when_seen, monitor.condition.seen(content)
    cursor = replace(cursor, when_seen=seen)
    try:
        holds = condition.is_met(content, before, cursor.fired)
    except ExpressionError as error:
        return replace(cursor, problem=f"{cursor.problem} when: {error}".strip())
    # If the clock was set back, the hold time restarts now.
    digest = seen.sha256 if seen is not None and condition.changed else ""
    is_held = cursor.held_time is not None and digest == cursor.held_sha256
    since = min(cursor.held_time or now, now) if is_held else now
    cursor = replace(cursor, held_time=since if holds else None, held_sha256=digest if holds else "")
    may = not cursor.fired or has_passed(cursor.fired_time, now, monitor.pause_seconds)
    may = may and cursor.fired < monitor.firings_max and has_passed(since, now, monitor.hold_seconds)
    if holds and may and (cursor.is_armed or condition.changed):
        return replace(cursor, fired=cursor.fired + 1, fired_time=now, is_armed=False)
    if holds and condition.changed:
        # The value still counts as changed after the pause, unless it has its earlier value again by then.
        cursor = replace(cursor, when_seen=before)
    return replace(cursor, is_armed=cursor.is_armed or not holds)


def has_passed(start: float, now: float, seconds: float) -> bool:
    """Return whether `seconds` have passed since `start`.

    Also return True if the clock was set back to a time before `start`.
    """
    return not 0 <= now - start < seconds


def _until(condition: Condition | None, cursor: JobCursor, content: Any) -> JobCursor:
    if condition is None:
        return cursor
    before = cursor.until_seen
    cursor = replace(cursor, until_seen=condition.seen(content))
    try:
        return replace(cursor, met=condition.is_met(content, before, cursor.fired))
    except ExpressionError as error:
        return replace(cursor, problem=f"until: {error}")


def _digested(cursor: JobCursor, number: int, result: str) -> JobCursor:
    cut = text.cut_bytes(result.encode(), _DIGESTED_BYTES_MAX)
    last = cursor.digest[-1] if cursor.digest else None
    if last is not None and last.result == cut:
        return replace(cursor, digest=(*cursor.digest[:-1], replace(last, last_round=number)))
    digest = (*cursor.digest, Digested(first_round=number, last_round=number, result=cut))
    left_out = sum(each.last_round - each.first_round + 1 for each in digest[:-DIGESTED_MAX])
    return replace(cursor, digest=digest[-DIGESTED_MAX:], digest_left_out=cursor.digest_left_out + left_out)


def _content(call: Call) -> Any:
    try:
        return msgspec.json.decode(call.result.content_json if call.result else b"null")
    except (msgspec.DecodeError, RecursionError):
        return None
