"""`pawl jobs`: what goes on in the background."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pawl.agent.v1 import jobs_pb2
from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.failure import CommandError
from pawl.cli.runs import Json, follow, show_table
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2

JobId = Annotated[str, typer.Argument(help="Id of the job.", show_default=False)]
JobIds = Annotated[list[str], typer.Argument(help="Ids of jobs.", show_default=False)]
_NARROW = 60

app = typer.Typer(help="See, pause and stop what goes on in the background.", no_args_is_help=True)


@app.command("list")
@command()
async def list_jobs(
    target: AsyncClient,
    console: Console,
    *,
    conversation: Annotated[str, typer.Option(help="Only those that report to this conversation.")] = "",
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)] = 20,
) -> None:
    """List your open jobs, the newest first."""
    request = jobs_pb2.ListJobsRequest(page_size=count, conversation_id=conversation, open_only=not ended)
    show_jobs(console, list((await target.jobs.ListJobs(request)).jobs), ended=ended)


@app.command()
@command()
async def show(target: AsyncClient, console: Console, job_id: JobId) -> None:
    """Show a job: what it does, how far it is, what it waits for and what it came to last."""
    for line in job_lines(await target.get_job(job_id)):
        console.print(line, markup=False, soft_wrap=True)


@app.command()
@command()
async def watch(
    target: AsyncClient,
    console: Console,
    job_id: JobId,
    *,
    after: Annotated[int, typer.Option(help="Events after this number only.", min=0)] = 0,
    json: Json = False,
) -> int:
    """Watch a job to its end; exit code 0 if it completed, 1 if it ended otherwise. Ctrl-C stops the watching."""
    await target.get_job(job_id)
    return await follow(target, console, job_id, after, json=json)


@app.command()
@command()
async def stop(
    target: AsyncClient,
    console: Console,
    job_ids: Annotated[list[str] | None, typer.Argument(help="Ids of jobs.", show_default=False)] = None,
    *,
    conversation: Annotated[str, typer.Option(help="All open ones that report to this conversation.")] = "",
    reason: Annotated[str, typer.Option(help="For the log.")] = "",
) -> None:
    """Stop jobs. One that has ended stays as it is."""
    if bool(job_ids) == bool(conversation):
        raise CommandError("Name the jobs, or give --conversation for all of one.")
    stopped = [await target.stop_job(job_id, reason) for job_id in job_ids or ()]
    stopped += await target.stop_jobs(conversation, reason) if conversation else ()
    for job in stopped:
        console.print(stopped_text(job), markup=False, soft_wrap=True)
    if not stopped:
        console.print("No job of the conversation is open.")


@app.command()
@command()
async def pause(target: AsyncClient, console: Console, job_ids: JobIds) -> None:
    """Pause jobs: no iteration begins until they are resumed. One that has begun ends as usual."""
    for job_id in job_ids:
        console.print(paused_text(await target.pause_job(job_id)), markup=False, soft_wrap=True)


@app.command()
@command()
async def resume(target: AsyncClient, console: Console, job_ids: JobIds) -> None:
    """Let paused jobs go on, on their beat. What they missed is skipped."""
    for job_id in job_ids:
        console.print(paused_text(await target.resume_job(job_id), resumed=True), markup=False, soft_wrap=True)


def show_jobs(console: Console, jobs: list[jobs_pb2.BackgroundJob], *, ended: bool = False) -> None:
    """Print jobs: a table on a terminal, lines with tabs elsewhere; a sentence if there are none."""
    if not jobs:
        console.print("There are no jobs." if ended else "No job is open.")
        return
    rows = [
        (
            job.job_id,
            state_text(job),
            wording.one_line(job.definition.tool_name, _NARROW),
            progress_text(job),
            wording.time_text(job.next_time) if job.HasField("next_time") else "",
            wording.one_line(job.last_result, _NARROW),
        )
        for job in jobs
    ]
    show_table(console, ("job", "state", "tool", "done", "next", "last result"), rows)


def job_lines(job: jobs_pb2.BackgroundJob) -> list[str]:
    """Return what there is to say of a job."""
    definition = job.definition
    lines = [f"{job.job_id}: {state_text(job)}", f"tool: {wording.clean(definition.tool_name)}"]
    lines += wording.json_block(definition.arguments_json).splitlines()
    lines.append(f"done: {progress_text(job)}")
    if job.trimmed_iterations:
        lines.append(f"kept: those from iteration {job.trimmed_iterations + 1} on")
    if definition.interval_seconds:
        until = f", until {wording.time_text(definition.end_time)}" if definition.HasField("end_time") else ""
        lines.append(f"each: {definition.interval_seconds:g} s{until}")
    if job.HasField("next_time"):
        lines.append(f"next: {wording.time_text(job.next_time)}")
    if job.HasField("waiting"):
        lines.append(wording.clean(job.waiting.sentence))
    if job.HasField("failure"):
        lines += wording.said("failed: ", f"{job.failure.reason}: {job.failure.message}")
    if job.last_result:
        lines += wording.said("last result: ", job.last_result)
    lines.append(f"begun: {wording.time_text(job.create_time)}, by run {job.parent_run_id}")
    if job.HasField("end_time"):
        lines.append(f"ended: {wording.time_text(job.end_time)}")
    lines.append(f"tells: conversation {job.conversation_id}")
    for call in job.pending_calls:
        if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
            lines.append(f"decide with: pawl approve {call.run_id} {call.call_id}")
    return lines


def state_text(job: jobs_pb2.BackgroundJob) -> str:
    """Return the state of a job, and who stopped it."""
    if job.waiting.reason == waiting_pb2.WAIT_REASON_PAUSED:
        return "paused"
    by_user = " by its user" if job.stop_cause == run_pb2.STOP_CAUSE_USER else ""
    return f"{wording.state_name(job.state)}{by_user or wording.STOPPED_BY.get(job.stop_cause, '')}"


def progress_text(job: jobs_pb2.BackgroundJob) -> str:
    """Return how many iterations a job has had, and how many of them failed."""
    failed = f" ({job.failures} failed)" if job.failures else ""
    return f"{job.iterations} of {job.definition.iterations_max}{failed}"


def stopped_text(job: jobs_pb2.BackgroundJob) -> str:
    """Return what became of a job that somebody wanted to stop."""
    return f"{job.job_id} ({wording.clean(job.definition.tool_name)}) is {wording.state_name(job.state)}."


def paused_text(job: jobs_pb2.BackgroundJob, *, resumed: bool = False) -> str:
    """Return what became of a job that somebody has paused or resumed."""
    now = "goes on" if resumed else f"is paused; it goes on with: pawl jobs resume {job.job_id}"
    return f"{job.job_id} ({wording.clean(job.definition.tool_name)}) {now}"
