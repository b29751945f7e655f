"""`pawl jobs`: what goes on in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import jobs_pb2, operator_pb2
from pawl.chassis import job_reports, strict_json
from pawl.cli import wording
from pawl.cli.command import Yes, command, is_sure, narrows
from pawl.cli.failure import CommandError
from pawl.cli.runs import Agent, ConversationKey, Json, Labels, follow, labels_of, show_table
from pawl.client import AsyncClient
from pawl.errors import InvalidField, InvalidJson, PawlError
from pawl.event.v1 import call_pb2, event_pb2, run_pb2, waiting_pb2

JobId = Annotated[str, typer.Argument(help="Id of the job.", show_default=False)]
JobIds = Annotated[list[str], typer.Argument(help="Ids of jobs.", show_default=False)]
_NARROW: Final = 60
_JSON_BYTES_MAX: Final = 256 * 1024
_COUNT_MAX: Final = 2**31 - 1
_REPORTS: Final = 'every, every=10, change, digest=600 (seconds), end or none; or as JSON, {"every": 10}'
_PROGRESS_SECONDS: Final = 2.0
_LAST_EVENTS: Final = 50
"""Among so many the last thing that a running tool has said of itself is looked for."""
_LOOKS: Final = 8

app = typer.Typer(help="Start, see, pause and stop what goes on in the background.", no_args_is_help=True)


@app.command()
@command()
async def start(
    target: AsyncClient,
    console: Console,
    tool: Annotated[str, typer.Argument(help="The tool to call.", show_default=False)],
    *,
    arguments: Annotated[str, typer.Option(help="Its arguments, a JSON object.")] = "{}",
    conversation: Annotated[str, typer.Option(help="The conversation that is told; a new one if left out.")] = "",
    conversation_key: ConversationKey = "",
    agent: Agent = "",
    label: Labels = None,
    interval: Annotated[float, typer.Option(help="Seconds from one call to the next; 0 to call once.", min=0)] = 0.0,
    stop_after: Annotated[int, typer.Option(help="Most calls, with --interval.", min=0, max=_COUNT_MAX)] = 0,
    duration: Annotated[float, typer.Option(help="Minutes after which no call begins, with --interval.", min=0)] = 0.0,
    delay_first: Annotated[bool, typer.Option("--delay-first", help="Begin after one interval.")] = False,
    until: Annotated[str | None, typer.Option(help="End once this is so of a result: CEL, or JSON.")] = None,
    when: Annotated[str | None, typer.Option(help="Tell each time that this becomes so: CEL, or JSON.")] = None,
    on_failure: Annotated[
        int,
        typer.Option(help="Failures in a row that are told, with --until or --when; 0 for 3.", min=0, max=_COUNT_MAX),
    ] = 0,
    reports: Annotated[str, typer.Option(help=f"Results that are told: {_REPORTS}.")] = "",
    minutes: Annotated[float, typer.Option("--estimated-minutes", help="How long it may take.", min=0)] = 0.0,
) -> None:
    """Start a job without a model: a call in the background, once or again and again."""
    job = await target.start_job(
        tool,
        json_object(arguments, "--arguments"),
        conversation_id=conversation,
        conversation_key=conversation_key,
        agent=agent,
        labels=labels_of(label),
        interval_seconds=interval,
        iterations_max=stop_after,
        duration_minutes=duration,
        delay_first=delay_first,
        estimated_minutes=minutes,
        reports=reports_of(reports),
        until=json_object(until, "--until") if until and until.startswith("{") else until,
        when=json_object(when, "--when") if when and when.startswith("{") else when,
        failures_told=on_failure,
    )
    for line in job_lines(job):
        console.print(line, markup=False, soft_wrap=True)


def json_object(said: str, option: str) -> dict[str, Any]:
    """Return the JSON object that an option has.

    Raises:
        CommandError: it is none.
    """
    try:
        found = strict_json.loads(said.encode(), bytes_max=_JSON_BYTES_MAX)
    except InvalidJson as error:
        raise CommandError(f"{option} is not JSON: {error.message}.") from None
    if not isinstance(found, dict):
        raise CommandError(f'{option} is a JSON object, like {{"n": 1}}.')
    return found


def reports_of(said: str, option: str = "--reports") -> str | dict[str, Any]:
    """Return the results that are told as a program says it: `every=10` as `{"every": 10}`, which may stand there, too.

    Raises:
        CommandError: it is none of what may be said.
    """
    kind, equals, amount = said.partition("=")
    try:
        if said.startswith("{"):
            found: str | dict[str, Any] = json_object(said, option)
        else:
            found = {kind: float(amount)} if equals else kind
        if said:
            job_reports.read(found)
    except (ValueError, InvalidField):
        raise CommandError(f"{option} is {_REPORTS}.") from None
    return found


@app.command("list")
@command()
async def list_jobs(
    target: AsyncClient,
    console: Console,
    *,
    conversation: Annotated[
        str, typer.Option(help="Only those that report to this conversation.", callback=narrows)
    ] = "",
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that have ended, too.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)] = 20,
) -> None:
    """List your open jobs, the newest first."""
    request = jobs_pb2.ListJobsRequest(page_size=count, conversation_id=conversation, open_only=not ended)
    found = list((await target.jobs.ListJobs(request)).jobs)
    if conversation and not found:
        await target.get_conversation(conversation)
    await show_jobs(target, console, found, ended=ended)


@app.command()
@command()
async def show(target: AsyncClient, console: Console, job_id: JobId) -> None:
    """Show a job: what it does, how far it is, what it waits for and what it came to last."""
    job = await target.get_job(job_id)
    for line in job_lines(job, await last_progress(target, job)):
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
    all_of_store: Annotated[
        bool, typer.Option("--all-of-store", help="All open ones of all users; for operators and admins.")
    ] = False,
    yes: Yes = False,
    reason: Annotated[str, typer.Option(help="For the log.")] = "",
) -> None:
    """Stop jobs. One that has ended stays as it is."""
    if [bool(job_ids), bool(conversation), all_of_store].count(True) != 1:
        raise CommandError("Name the jobs, or give --conversation for all of one, or --all-of-store.")
    if all_of_store:
        if is_sure("Stop all jobs of the store, of all users?", yes=yes):
            request = operator_pb2.EndJobsRequest(reason=reason)
            job_ids = list((await target.once(target.operators.EndJobs, request)).job_ids)
            console.print("\n".join([*job_ids, f"{len(job_ids)} stopped."]), markup=False, soft_wrap=True)
        return
    stopped = [await target.stop_job(job_id, reason) for job_id in job_ids or ()]
    stopped += await target.stop_jobs(conversation, reason) if conversation else ()
    for job in stopped:
        console.print(wording.stopped_text(job), markup=False, soft_wrap=True)
    if not stopped:
        console.print("No job of the conversation is open, or each is being stopped already.")


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


async def show_jobs(
    target: AsyncClient, console: Console, jobs: Sequence[jobs_pb2.BackgroundJob], *, ended: bool = False
) -> None:
    """Print jobs: a table on a terminal, lines with tabs elsewhere; a sentence if there are none.

    Of one whose tool says how far it is that stands where the last result does.
    """
    if not jobs:
        console.print("There are no jobs." if ended else "No job is open.")
        return
    looks = asyncio.Semaphore(_LOOKS)

    async def row(job: jobs_pb2.BackgroundJob) -> tuple[str, ...]:
        async with looks:
            progress = await last_progress(target, job)
        return (
            job.job_id,
            state_text(job),
            wording.one_line(job.definition.tool_name, _NARROW),
            progress_text(job),
            wording.time_text(job.next_time) if job.HasField("next_time") else "",
            f"… {wording.share_text(progress)}" if progress else wording.one_line(job.last_result, _NARROW),
        )

    rows = await asyncio.gather(*map(row, jobs))
    show_table(console, ("job", "state", "tool", "done", "next", "last result"), rows)


async def last_progress(target: AsyncClient, job: jobs_pb2.BackgroundJob) -> event_pb2.ToolProgress | None:
    """Return what the tool of a job that is at work has said last of how far it is; None if it has said nothing."""
    if job.state != run_pb2.RUN_STATE_RUNNING:
        return None
    found: event_pb2.ToolProgress | None = None
    with suppress(PawlError, TimeoutError):  # What is told beside the job must not hinder that.
        async with asyncio.timeout(_PROGRESS_SECONDS):
            last = (await target.get(job.job_id)).last_seq
            async with aclosing(target.watch(job.job_id, max(0, last - _LAST_EVENTS))) as events:
                async for event in events:
                    if isinstance(event, event_pb2.RunEvent):
                        found = progress_after(event, found)
                    if (event.seq if isinstance(event, event_pb2.RunEvent) else event.to_seq) >= last:
                        break
    return found


def progress_after(event: event_pb2.RunEvent, before: event_pb2.ToolProgress | None) -> event_pb2.ToolProgress | None:
    """Return the progress that holds after an event: what was said of a call holds until the call changes."""
    if event.HasField("tool_progress"):
        return event.tool_progress
    is_over = before is not None and event.call_changed.call.call_id == before.call_id
    return None if is_over else before


def job_lines(job: jobs_pb2.BackgroundJob, progress: event_pb2.ToolProgress | None = None) -> list[str]:
    """Return what there is to say of a job, and of the progress of its tool."""
    definition = job.definition
    lines = [f"{job.job_id}: {state_text(job)}", f"tool: {wording.clean(definition.tool_name)}"]
    lines += wording.json_block(definition.arguments_json).splitlines()
    lines.append(f"done: {progress_text(job)}")
    if progress:
        lines.append(f"now: {wording.share_text(progress)}")
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
    by_run = f", by run {job.parent_run_id}" if job.parent_run_id else ""
    lines.append(f"begun: {wording.time_text(job.create_time)}{by_run}")
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
    """Return how many iterations a job has had, how many of them failed, and how often there was none in time."""
    failed = f" ({job.failures} failed)" if job.failures else ""
    missed = f", {job.missed_iterations} missed" if job.missed_iterations else ""
    return f"{job.iterations} of {job.definition.iterations_max}{failed}{missed}"


def paused_text(job: jobs_pb2.BackgroundJob, *, resumed: bool = False) -> str:
    """Return what became of a job that somebody has paused or resumed."""
    now = "goes on" if resumed else f"is paused; it goes on with: pawl jobs resume {job.job_id}"
    if not (resumed or job.definition.interval_seconds):
        now = f"is called once, and ends as usual if it has begun; to end it: pawl jobs stop {job.job_id}"
    return f"{wording.job_name(job)} {now}"
