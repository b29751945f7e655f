"""Implements `pawl jobs`, for calls that run in the background."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import jobs_pb2, operator_pb2
from pawl.chassis import job_reports
from pawl.cli import wording
from pawl.cli.command import Yes, command, confirm, object_of, say
from pawl.cli.contract import Columns, Json, Option, listing, verb
from pawl.cli.failure import CommandError
from pawl.cli.runs import follow
from pawl.client import AsyncClient
from pawl.client.jobs import condition, monitor
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2

JobId = Annotated[str, typer.Argument(help="Id of the job.", show_default=False)]
JobIds = Annotated[list[str], typer.Argument(help="Ids of jobs.", show_default=False)]
_REPORTS: Final = (
    'every, every=10, change, digest=600 (seconds), end or none; or as JSON, {"every": 10}; without --interval, '
    "progress=25,50,75 (percent) or minutes=10"
)


def put_reports(message: Any, given: str, option: str = "--reports") -> None:
    """Set which results are reported: `every=10`, or {"every": 10}.

    Raises:
        CommandError: The value is invalid.
    """
    kind, equals, amount = given.partition("=")
    try:
        percents = [int(each) for each in amount.split(",")] if kind == "progress" else []
        named = {kind: percents or float(amount)} if equals else kind
        read = object_of(given, option) if given.startswith("{") else named
        fields = job_reports.read(read)
    except (ValueError, InvalidField):
        raise CommandError(f"{option} must be {_REPORTS}.") from None
    message.reports = run_pb2.JobReports.Value(f"JOB_REPORTS_{fields.pop('reports')}")
    message.report_percents.extend(fields.pop("report_percents", ()))
    for name, value in fields.items():
        setattr(message, name, value)


def _arguments(request: jobs_pb2.StartJobRequest, given: str) -> None:
    object_of(given, "--arguments")
    request.arguments_json = given.encode()


def _until(request: jobs_pb2.StartJobRequest, given: str) -> None:
    request.until.CopyFrom(condition(object_of(given, "--until") if given.startswith("{") else given))


def _watch_for(request: jobs_pb2.StartJobRequest, given: str) -> None:
    request.when.CopyFrom(monitor(object_of(given, "--when") if given.startswith("{") else given))


def _lines(answer: Any, _: Any) -> list[str]:
    return job_lines(answer.job)


_STOPS: Final = {run_pb2.RUN_STATE_CANCELLING: "being stopped", run_pb2.RUN_STATE_CANCELLED: "stopped"}


def state_text(job: jobs_pb2.BackgroundJob) -> str:
    if job.waiting.reason == waiting_pb2.WAIT_REASON_PAUSED:
        return "paused"
    by_user = " by its user" if job.stop_cause == run_pb2.STOP_CAUSE_USER else ""
    state = _STOPS.get(job.state) or wording.state_name(job.state)
    return f"{state}{by_user or wording.STOPPED_BY.get(job.stop_cause, '')}"


def progress_text(job: jobs_pb2.BackgroundJob) -> str:
    """Return a job's progress. For a job with a single call, this is just the call's progress."""
    failed = f" ({job.failures} failed)" if job.failures else ""
    missed = f"{job.missed_iterations} missed" if job.missed_iterations else ""
    count = f"{job.iterations} of {job.definition.iterations_max}{failed}" if job.definition.iterations_max > 1 else ""
    shown = wording.progress_text(job.progress) if job.HasField("progress") else ""
    return ", ".join(filter(None, (count, missed, shown)))


COLUMNS: Final[Columns] = {
    "job": "job_id",
    "state": state_text,
    "tool": "definition.tool_name",
    "progress": progress_text,
    "next": "next_time",
    "expected end": "expected_end_time",
    "last result": lambda job: wording.one_line(job.last_result, 60),
}
_SHOWN: Final = (
    *("conversation_id", "parent_run_id", "definition", "create_time", "end_time", "next_time", "last_result"),
    *("failure", "waiting", "trimmed_iterations", "expected_end_time", "not_stopped"),
)
NONE_OPEN: Final = "There are no jobs."

app = typer.Typer(help="Start, list, watch, pause and stop background jobs.", no_args_is_help=True)
app.command("start")(
    verb(
        jobs_pb2.StartJobRequest(),
        {
            "tool": "tool_name",
            "--arguments": Option(path="arguments_json", put=_arguments),
            "--conversation": "conversation_id",
            "--conversation-key": "conversation_key",
            "--agent": "agent",
            "--label": "labels",
            "--interval": "interval_seconds",
            "--stop-after": "iterations_max",
            "--duration": "duration_minutes",
            "--delay-first": "delay_first",
            "--until": Option(
                path="until", help="End when this condition holds for a result: CEL or JSON.", put=_until
            ),
            "--when": Option(
                path="when", help="Report each time this condition becomes true: CEL or JSON.", put=_watch_for
            ),
            "--on-failure": "failures_told",
            "--reports": Option(path="reports", help=f"Which results to report: {_REPORTS}.", put=put_reports),
            "--estimated-minutes": "estimated_minutes",
        },
        "Start a background job without a model. It calls a tool once or repeatedly.",
        _lines,
    )
)
app.command("list")(
    listing(
        jobs_pb2.ListJobsRequest(open_only=True),
        {
            "--conversation": "conversation_id",
            "--all -a": Option(path="open_only", help="Also list jobs that have ended.", constant=False),
        },
        "List your open jobs, newest first.",
        COLUMNS,
        none=NONE_OPEN,
        count=20,
    )
)


app.command("show")(
    verb(
        jobs_pb2.GetJobRequest(),
        {"job": "job_id"},
        "Show a job: its call, progress, wait reason and last result.",
        _lines,
    )
)


@app.command()
@command()
async def watch(
    target: AsyncClient,
    console: Console,
    job_id: JobId,
    *,
    after: Annotated[int, typer.Option(help="Only events after this number.", min=0)] = 0,
    json: Json = False,
) -> int:
    """Watch a job until it ends.

    Of its earlier progress reports, only the newest is shown. The exit code is 0 if it
    completed, otherwise 1. Ctrl-C does not stop the job.
    """
    await target.get_job(job_id)
    last_seq = (await target.get(job_id)).last_seq
    return await follow(target, console, job_id, after, last_seq=last_seq, json=json)


@app.command()
@command()
async def stop(
    target: AsyncClient,
    console: Console,
    job_ids: Annotated[list[str] | None, typer.Argument(help="Ids of jobs.", show_default=False)] = None,
    *,
    conversation: Annotated[str, typer.Option(help="Stop all open jobs that report to this conversation.")] = "",
    all_of_store: Annotated[
        bool, typer.Option("--all-of-store", help="Stop all users' open jobs in the store. For operators and admins.")
    ] = False,
    yes: Yes = False,
    reason: Annotated[str, typer.Option(help="The reason, which is written to the log.")] = "",
) -> None:
    """Stop jobs. Jobs that have already ended are unchanged."""
    if [bool(job_ids), bool(conversation), all_of_store].count(True) != 1:
        raise CommandError("Specify exactly one of: job IDs, --conversation or --all-of-store.")
    if all_of_store:
        if confirm("Stop all users' jobs in the store?", yes=yes):
            request = operator_pb2.EndJobsRequest(reason=reason)
            job_ids = list((await target.once(target.operators.EndJobs, request)).job_ids)
            say(console, [*job_ids, f"{len(job_ids)} stopped."])
        return
    stopped = [await target.stop_job(job_id, reason) for job_id in job_ids or ()]
    stopped += await target.stop_jobs(conversation, reason) if conversation else ()
    say(console, map(wording.stopped_text, stopped))
    if not stopped:
        say(console, "The conversation has no open jobs to stop.")


@app.command()
@command()
async def pause(target: AsyncClient, console: Console, job_ids: JobIds) -> None:
    """Pause jobs. A running iteration finishes, but no new one starts until the jobs are resumed."""
    for job_id in job_ids:
        say(console, paused_text(await target.pause_job(job_id)))


@app.command()
@command()
async def resume(target: AsyncClient, console: Console, job_ids: JobIds) -> None:
    """Resume paused jobs on their original schedule. Missed iterations are skipped."""
    for job_id in job_ids:
        say(console, paused_text(await target.resume_job(job_id), resumed=True))


def job_lines(job: jobs_pb2.BackgroundJob) -> list[str]:
    return [
        f"{job.job_id}: {state_text(job)}",
        *(f"progress: {text}" for text in [progress_text(job)] if text),
        *wording.described(job, only=_SHOWN),
        *(
            f"decide with: pawl approve {call.run_id} {call.call_id}"
            for call in job.pending_calls
            if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL
        ),
    ]


def paused_text(job: jobs_pb2.BackgroundJob, *, resumed: bool = False) -> str:
    now = "continues" if resumed else f"is paused. Resume it with: pawl jobs resume {job.job_id}"
    if not (resumed or job.definition.interval_seconds):
        now = f"is a single call, which cannot be paused once it has started. Stop it with: pawl jobs stop {job.job_id}"
    return f"{wording.job_name(job)} {now}"
