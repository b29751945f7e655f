"""Implements jobs. A job makes one call, once or repeatedly, without calling a model. Notices report the results.

Iteration n of a series is scheduled n intervals after the start of the job. Scheduled times that pass during a slow
iteration or a pause are skipped, and the job reports how many were skipped. Each iteration is a round with one call,
whose id is derived from the run and the round.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import jobs, monitor, progress
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import Decision, Fail, Finish, PinTools, Propose, TellProgress, Wait
from pawl.agent_loop.loop.rules.fact import Command, OwnerEvent, Pause, ToolProgress
from pawl.agent_loop.loop.rules.loop_state import JobCursor
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.run import FailureClass, Job, JobProgress, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis import strict_json
from pawl.values import CallState, RunState, WaitKind

# Maximum backoff for a job whose polls fail.
BACKOFF_SECONDS_MAX: Final = 3600.0
# A user was asked and did not approve, so do not ask again.
_NOT_WANTED: Final = frozenset({CallState.REJECTED, CallState.EXPIRED})
# A call in these states is working, not waiting for a user.
_WORKING: Final = frozenset({CallState.RUNNING, CallState.DELEGATED})
# A rule denies the call. Until it changes, every iteration would fail.
_DENIED: Final = frozenset({"NOT_ALLOWED", "PERMISSION_DENIED"})
# Tolerance for rounding errors in scheduled times.
_TINY: Final = 1e-6


class _Success(msgspec.Struct, frozen=True):
    success: bool = True


class JobProgram(Program):
    def follows(self, state: State, now: float) -> Decision:
        run, job = state.run, state.run.job
        if job is None:
            raise RuntimeError("the run is not a job")
        if not (run.round or run.tools or state.tools_pinned):
            return PinTools()
        cursor = _cursor(state)
        paused = (WaitKind.PAUSED,) if cursor.is_paused else ()
        if state.open_calls:
            report_time = _progress_report_time(state, job, cursor, now)
            is_due = report_time is not None and report_time <= now
            return TellProgress() if is_due else Wait(until=report_time, waits=paused)
        made = (call for call in state.calls.values() if call.run_id == run.run_id and call.round == run.round)
        last = next(made, None)
        is_over = last is not None and (not job.interval_seconds or last.state in _NOT_WANTED)
        if last is not None and is_over and (last.state is not CallState.SUCCEEDED or _reports_failure(last)):
            return Fail(failure=_failure(last))
        if run.round >= job.iterations_max or monitor.is_over(job, cursor):
            return Finish(state=RunState.COMPLETED)
        due = due_time(job, last, _not_before(job, last, cursor))
        if job.end_time is not None and (due > job.end_time or (paused and now >= job.end_time)):
            return Finish(state=RunState.COMPLETED)
        if paused:
            return Wait(until=job.end_time, waits=paused)
        return Wait(until=due) if due > now else Propose(calls=(jobs.draft(run, job, now),))

    def commanded(self, state: State, command: Command, now: float) -> State:  # the job has its own time
        """Pause or resume the job. A paused job does not start iterations."""
        return _paused(state, command.time, resumes=command.kind.resumes) if isinstance(command.kind, Pause) else state

    def reported(self, base: State, after: State) -> tuple[State, tuple[OwnerEvent, ...]]:
        """Record the result of the iteration that a step settled. Decide whether to report it.

        If a rule denies an iteration of a series, the job pauses and reports the pause. The user can resume the job
        once the rule allows the call.
        """
        job, cursor = after.run.job, _cursor(after)
        if job is None:
            return after, ()
        settled = [
            call
            for call in after.calls.values()
            if call.run_id == after.run.run_id
            and call.settled
            and not (call.call_id in base.calls and base.calls[call.call_id].settled)
        ]
        if not settled:
            return after, ()
        call = max(settled, key=lambda each: each.round)
        outcome = jobs.result_text(call)
        evaluated = monitor.evaluated(job, cursor, call, outcome)
        denial = _denial(call) if job.interval_seconds else ""
        seen, report_due = monitor.report_due(job, cursor, evaluated, call, outcome)
        ends_digest = seen.digest_time != evaluated.digest_time
        job_output = monitor.job_output(
            job, cursor, evaluated, outcome, after.run.output_text, paused=denial, ends_digest=ends_digest
        )
        is_kept = not job.interval_seconds and call.state is not CallState.SUCCEEDED
        seen = replace(seen, fraction_max=0.0)
        run = replace(
            after.run,
            output_text=job_output,
            missed_iterations=missed(job, call),
            job_progress=after.run.job_progress if is_kept else None,
        )
        after = replace(after, run=run, loop=replace(after.loop, cursor=seen))
        if denial:
            after = _paused(after, call.end_time or 0.0, resumes=False)
        return (replace(after, tells_iteration=call.round) if report_due or denial else after), ()


def _paused(state: State, time: float, *, resumes: bool) -> State:
    cursor = _cursor(state)
    if cursor.is_paused is not resumes:
        return state
    after = replace(cursor, is_paused=not resumes, resume_time=time if resumes else cursor.resume_time)
    return replace(state, loop=replace(state.loop, cursor=after))


def progressed(state: State, report: ToolProgress, now: float) -> State:
    """Record the progress of the open call. If another worker runs the call again, the start time does not change."""
    call, before = state.calls.get(report.call_id), state.run.job_progress
    if call is None or call.settled:
        return state
    latest = JobProgress(
        fraction=report.fraction,
        message=report.message,
        time=now,
        start_time=before.start_time if before is not None else call.start_time or now,
    )
    cursor = progress.advanced(_cursor(state), report, call.attempt)
    shown = latest if report.message or report.fraction is not None else before
    return replace(state, run=replace(state.run, job_progress=shown), loop=replace(state.loop, cursor=cursor))


def progress_told(state: State, now: float) -> State:
    """Report the progress of the open call with the next commit. `Notice` explains how reports are numbered."""
    run, job = state.run, state.run.job
    if job is None:
        return state
    cursor = progress.reported(job, _cursor(state), run.job_progress, now)
    occasion = run.round + cursor.progress_reports
    return replace(state, loop=replace(state.loop, cursor=cursor), tells_iteration=occasion)


def _progress_report_time(state: State, job: Job, cursor: JobCursor, now: float) -> float | None:
    started = (call.start_time for call in state.open_calls if call.state in _WORKING and call.start_time is not None)
    start_time = min(started, default=None)
    if start_time is None:
        return None
    return progress.report_time(job, cursor, state.run.job_progress, start_time, now)


def _cursor(state: State) -> JobCursor:
    cursor = state.loop.cursor
    return cursor if isinstance(cursor, JobCursor) else JobCursor()


def due_time(job: Job, last: Call | None, resume_time: float = 0.0) -> float:
    """Return the scheduled time of the iteration after `last` or, if `last` is None, of the first iteration.

    Iterations are scheduled at whole intervals after the job's start. The returned time is neither before the end of
    `last` nor before `resume_time`.
    """
    if not job.interval_seconds:
        return job.begin_time
    times = (last.create_time, last.end_time, resume_time) if last is not None else (None, None, resume_time)
    started, ended, resumed = (((time or job.begin_time) - job.begin_time) / job.interval_seconds for time in times)
    first = job.delay_first if last is None else math.floor(started + _TINY) + 1
    return job.begin_time + job.interval_seconds * max(first, math.ceil(ended - _TINY), math.ceil(resumed - _TINY))


def _not_before(job: Job, last: Call | None, cursor: JobCursor) -> float:
    """Return the earliest time for the next iteration. Failed polls can delay it beyond the resume time."""
    if last is None or last.end_time is None or (job.until is None and job.when is None):
        return cursor.resume_time
    doublings = max(0, min(cursor.failed_in_a_row, 20) - 1)
    pause = min(job.interval_seconds * ((1 << doublings) - 1), BACKOFF_SECONDS_MAX)
    return max(cursor.resume_time, last.end_time + pause)


def missed(job: Job, last: Call) -> int:
    """Return how many scheduled times passed without an iteration before `last` ended.

    Nothing is scheduled after the last iteration. The count is too low if the clock was set back.
    """
    if not job.interval_seconds:
        return 0
    after = due_time(job, last if last.round < job.iterations_max else replace(last, end_time=None))
    beats = round((after - job.begin_time) / job.interval_seconds)
    if job.end_time is not None:
        beats = min(beats, math.floor((job.end_time - job.begin_time) / job.interval_seconds + _TINY) + 1)
    return max(0, beats - job.delay_first - last.round)


def _denial(call: Call) -> str:
    """Return the message of the rule that denied the call, or an empty string if no rule did."""
    is_denied = call.state is CallState.FAILED and call.result is not None and call.result.error_reason in _DENIED
    return _message(call) if is_denied else ""


def _message(call: Call) -> str:
    outcome = None
    if (result := call.result) is not None:
        content = strict_json.loads(result.content_json, bytes_max=len(result.content_json) or 1)
        outcome = content.get("error") if isinstance(content, dict) else content
    otherwise = (
        "The tool did not report success."
        if _reports_failure(call)
        else f"The call ended in the state {call.state.name}."
    )
    return (outcome if isinstance(outcome, str) and outcome else otherwise)[:1000]


def _reports_failure(call: Call) -> bool:
    """Return whether the tool's result reports failure with `"success": false`."""
    try:
        return call.result is not None and not msgspec.json.decode(call.result.content_json, type=_Success).success
    except msgspec.DecodeError:
        return False


def _failure(call: Call) -> RunFailure:
    result, message = call.result, _message(call)
    reason = result.error_reason if result is not None and result.error_reason else call.state.name
    reason = "TOOL_ERROR" if call.state is CallState.SUCCEEDED else reason
    return RunFailure(failure_class=FailureClass.TOOL, reason=reason, message=message)
