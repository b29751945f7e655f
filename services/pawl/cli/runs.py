"""Implements `pawl run`, `watch`, `runs`, `status`, `steps`, `cancel` and `top-up`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from pawl.agent.v1 import agent_pb2, steps_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, follows, labels_of, read_file, say, seconds_of
from pawl.cli.contract import Columns, Json, Option, choices, json_line, listing, number_of, verb
from pawl.cli.transcript import ENDED, Transcript, decides, hint, top_up_hint
from pawl.client import AsyncClient, file, form, image
from pawl.client.forms import IMAGE_BYTES_MAX, SCHEMA_BYTES_MAX
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2, event_pb2, gap_pb2, run_pb2, waiting_pb2

_EFFORT: Final = run_pb2.ReasoningEffort.DESCRIPTOR
EventJson = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show the model's full reasoning.")]
Agent = Annotated[str, typer.Option(help="One of the store's agents. Default: 'default'.")]
RunId = Annotated[str, typer.Argument(help="Id of the run.", show_default=False)]
Effort: Any = Annotated[choices(_EFFORT) | None, typer.Option(help="The model's reasoning effort.", show_default=False)]
ConversationKey = Annotated[
    str,
    typer.Option(
        "--conversation-key", help="Continue or create your conversation with this key, any text up to 200 bytes."
    ),
]
_POLL_SECONDS: Final = 1.0
_TOKENS_MAX: Final = 2**63 - 1
_FACTS: Final = (
    *("create_time", "update_time", "progress_time", "round", "call_counts", "agent", "labels", "grant"),
    *("parent_run_id", "parent_call_id", "child_run_ids"),
)
_STEPS: Final = {
    steps_pb2.STEP_TYPE_REASONING: ("reasoning", "dim italic"),
    steps_pb2.STEP_TYPE_PLANNING: ("planning", ""),
    steps_pb2.STEP_TYPE_TOOL_CALL: ("call", "cyan"),
    steps_pb2.STEP_TYPE_RESULT: ("result", "green"),
    steps_pb2.STEP_TYPE_QUESTION: ("question", "yellow"),
    steps_pb2.STEP_TYPE_ANSWER: ("answer", "bold"),
}
_STATUSES: Final = {
    steps_pb2.STEP_STATUS_ACTIVE: " (running)",
    steps_pb2.STEP_STATUS_WAITING: " (waiting)",
    steps_pb2.STEP_STATUS_FAILED: " (failed)",
    steps_pb2.STEP_STATUS_STOPPED: " (stopped)",
}


@command()
async def run(
    target: AsyncClient,
    console: Console,
    text: Annotated[str, typer.Argument(help="The message to the agent.", show_default=False)],
    *,
    conversation: Annotated[str, typer.Option(help="Continue this conversation.")] = "",
    conversation_key: ConversationKey = "",
    agent: Agent = "",
    label: Annotated[list[str] | None, typer.Option("--label", help="A label: key=value. Repeatable.")] = None,
    model: Annotated[str, typer.Option(help="Model to use. Default: the deployment's model.")] = "",
    tokens_max: Annotated[
        int, typer.Option(help="Token budget; 0 means the deployment's default.", min=0, max=_TOKENS_MAX)
    ] = 0,
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", help="Attach an image file. Repeatable.", show_default=False),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", help="Attach one of your documents, by name. Repeatable.", show_default=False),
    ] = None,
    shared_files: Annotated[
        list[str] | None,
        typer.Option(
            "--shared-file", help="Attach one of the store's shared documents, by name. Repeatable.", show_default=False
        ),
    ] = None,
    tools: Annotated[str, typer.Option(help="Tools that the run may call, separated by commas. Default: all.")] = "",
    effort: Effort = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A file with a JSON Schema for the answer.", show_default=False),
    ] = None,
    no_background: Annotated[bool, typer.Option("--no-background", help="Do not run calls in the background.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the run id and exit.")] = False,
    json: EventJson = False,
    reasoning: Reasoning = False,
) -> int:
    """Start a run and watch it.

    The exit code is 0 if the run completed, otherwise 1. Ctrl-C stops watching but does not stop the run.
    """
    options = run_pb2.RunOptions(model=model, reasoning_effort=effort_of(effort), without_background=no_background)
    if schema is not None:
        options.response_format.CopyFrom(form(read_file(schema, SCHEMA_BYTES_MAX + 1)))
    options.tool_names.extend(filter(None, map(str.strip, tools.split(","))))
    if tokens_max:
        options.limits.total_tokens_max = tokens_max
    started = await target.start(
        text,
        parts=[
            *(image(read_file(path, IMAGE_BYTES_MAX + 1)) for path in images or ()),
            *map(file, files or ()),
            *(file(name, shared=True) for name in shared_files or ()),
        ],
        conversation_id=conversation,
        conversation_key=conversation_key,
        agent=agent,
        labels=labels_of(label),
        options=options,
    )
    if started.queue_position:
        typer.echo(f"queued, position {started.queue_position}", err=True)
    if detach:
        say(console, started.run_id)
        return 0
    return await follow(target, console, started.run_id, 0, json=json, reasoning=reasoning)


def effort_of(effort: Any) -> Any:
    """Return the contract's value for a reasoning effort. Return 0 if `effort` is None."""
    return number_of(_EFFORT, effort) if effort else 0


@command()
async def watch(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    after: Annotated[int, typer.Option(help="Only events after this number.", min=0)] = 0,
    json: EventJson = False,
    reasoning: Reasoning = False,
) -> int:
    """Watch a run until it ends.

    Starts at its first event, or after `--after`. Of earlier progress, only the newest is shown. The exit code is the
    same as for `run`.
    """
    last_seq = (await target.get(run_id)).last_seq
    return await follow(target, console, run_id, after, last_seq=last_seq, json=json, reasoning=reasoning)


async def follow(
    target: AsyncClient,
    console: Console,
    run_id: str,
    after_seq: int,
    *,
    last_seq: int = 0,
    json: bool = False,
    reasoning: bool = False,
) -> int:
    """Show a run's events after `after_seq` until the run ends. Return the exit code.

    Up to `last_seq`, show only the newest progress of calls that are still open. JSON output shows everything.
    """
    follows(target)
    transcript = Transcript(console, whole_reasoning=reasoning, hints=True)
    state, delegates = run_pb2.RUN_STATE_UNSPECIFIED, asyncio.Event()
    child_calls = asyncio.create_task(show_child_calls(target, transcript, run_id, delegates), name="runs.child_calls")
    try:
        async for event in without_old_progress(target.watch(run_id, after_seq), 0 if json else last_seq):
            if isinstance(event, event_pb2.RunEvent) and event.HasField("run_changed"):
                state = event.run_changed.run.state
                delegates.clear()
                if run_pb2.WAIT_KIND_AGENT in event.run_changed.run.waits and not json:
                    delegates.set()
            if json:
                print(json_line(event), flush=True)
            elif isinstance(event, gap_pb2.Gap):
                transcript.show_gap(event)
            else:
                transcript.show(event)
    except asyncio.CancelledError:
        if not json:
            transcript.line(f"The run continues. Watch it again with: pawl watch {run_id}", "dim")
        raise
    finally:
        child_calls.cancel()
        await asyncio.wait([child_calls])
        transcript.end_line()
    if state not in ENDED:  # The stream had no further events.
        state = (await target.get(run_id)).state
    return 0 if state == run_pb2.RUN_STATE_COMPLETED else EXIT_UNSUCCESSFUL


async def without_old_progress(
    events: AsyncIterator[event_pb2.RunEvent | gap_pb2.Gap], last_seq: int
) -> AsyncIterator[event_pb2.RunEvent | gap_pb2.Gap]:
    """Drop progress up to `last_seq`, except the newest progress of each call that is still open."""
    newest: dict[str, event_pb2.RunEvent] = {}
    async for event in events:
        if isinstance(event, gap_pb2.Gap):
            yield event
            continue
        if event.HasField("tool_progress") and event.seq <= last_seq:
            newest[event.tool_progress.call_id] = event
        else:
            newest.pop(event.call_changed.call.call_id, None)
            yield event
        if event.seq >= last_seq:
            for each in newest.values():
                yield each
            newest.clear()


async def show_child_calls(target: AsyncClient, transcript: Transcript, run_id: str, delegates: asyncio.Event) -> None:
    """While the run is waiting for other agents, show each pending call of its child runs once. Never returns."""
    shown = set[tuple[str, int]]()
    while True:
        await delegates.wait()
        with suppress(PawlError):  # The event stream reports lasting errors.
            run = await target.get(run_id)
            for call in run.pending_calls:
                if call.run_id != run_id and (call.call_id, call.state) not in shown:
                    shown.add((call.call_id, call.state))
                    transcript.pending(call)
                    transcript.command(hint(call, decides=decides(run)))
        await asyncio.sleep(_POLL_SECONDS)


def _since(request: agent_pb2.ListRunsRequest, lasts: str) -> None:
    seconds = max(0.0, time.time() - seconds_of(lasts, "create_time_from"))
    request.create_time_from.FromMicroseconds(int(seconds * 1e6))


def _state_and_waits(run: run_pb2.Run) -> str:
    waits = wording.wait_names(run.waits) if run.waits else wording.QUEUED_FOR.get(run.waiting.reason, "")
    return f"{wording.state_name(run.state)} for {waits}" if waits else wording.state_name(run.state)


def _program(run: run_pb2.Run) -> str:
    if run.HasField("goal"):
        return f"goal: {wording.one_line(run.goal.aim, 40)}"
    return f"workflow: {wording.clean(run.workflow.name)}" if run.HasField("workflow") else ""


COLUMNS: Final[Columns] = {
    "run": "run_id",
    "state": _state_and_waits,
    "program": _program,
    "created": "create_time",
    "conversation": "conversation_id",
    "output": lambda run: wording.one_line(run.output_text),
}
NO_RUNS: Final = 'There are no runs. Start one with `pawl run "what is 17 * 23"`.'
runs: Final = listing(
    agent_pb2.ListRunsRequest(order=agent_pb2.RUN_ORDER_NEWEST_FIRST),
    {
        "--conversation": "conversation_id",
        "--state": "states",
        "--wait": "waits",
        "--parent": "parent_run_id",
        "--agent": "agent",
        "--label": "labels",
        "--since": Option(path="create_time_from", help="Only runs created in the last 30m, 2h or 7d.", put=_since),
        "--oldest": Option(path="order", help="Oldest first.", constant=agent_pb2.RUN_ORDER_OLDEST_FIRST),
    },
    "List your runs, newest first.",
    COLUMNS,
    none=NO_RUNS,
    count=20,
)
top_up: Final = verb(
    agent_pb2.TopUpRunRequest(),
    {"run": "run_id", "tokens": "tokens"},
    "Add tokens to a run's budget. A run waiting for tokens continues.",
    lambda answer, _: f"{answer.run.run_id} {wording.budget_text(answer.run)}.",
)


def _cancelled(answer: Any, request: Any) -> list[str]:
    ends = "{} continues. Stop it with: pawl jobs stop {}"
    jobs = [
        wording.stopped_text(job) if request.cancel_jobs else ends.format(wording.job_name(job), job.job_id)
        for job in answer.jobs
    ]
    return [f"{request.run_id} is {wording.state_name(answer.run.state)}.", *jobs]


cancel: Final = verb(
    agent_pb2.CancelRunRequest(),
    {"run": "run_id", "--jobs": "cancel_jobs", "--reason": "reason"},
    "Cancel a run. A run that has ended is unchanged.",
    _cancelled,
)


@command()
async def status(target: AsyncClient, console: Console, run_id: RunId, *, json: Json = False) -> None:
    """Show the state of a run.

    Includes why it is waiting, since when and for whom, what would let it continue, and its open calls.
    """
    run = await target.get(run_id)
    if json:
        print(json_line(run))
        return
    say(console, status_lines(run, datetime.now(UTC)))
    transcript = Transcript(console)
    for call in run.pending_calls:
        transcript.pending(call)
        transcript.command(hint(call, decides=decides(run)))
    if run.waiting.reason == waiting_pb2.WAIT_REASON_TOKENS:
        transcript.command(top_up_hint(run))
    say(console, map(_active, run.active_calls))


def status_lines(run: run_pb2.Run, now: datetime) -> list[str]:
    lines = [f"{run.run_id} is {wording.state_name(run.state)}, in conversation {run.conversation_id}"]
    lines += [wording.budget_text(run)] if run.token_budget else []
    lines += wording.described(run, only=_FACTS)
    for name, requested in sorted(run.lowered_limits.items()):
        most, instead = getattr(run.options.limits, name), f"{requested:.15g}" if requested else "unlimited"
        lines.append(f"{name} is {most:.15g} instead of {instead}: the store's limit is lower")
    if run.waiting.sentence:
        lines += [wording.one_line(run.waiting.sentence, 2048), f"since {wording.time_text(run.waiting.since_time)}"]
        if run.waiting.HasField("deadline_time"):
            lines[-1] += f", {wording.remaining_text(run.waiting.deadline_time, now)}"
        lines.append(f"to continue: {wording.one_line(run.waiting.remedy, 300)}")
    return lines


def _active(call: call_pb2.Call) -> str:
    since = f" since {wording.time_text(call.start_time)}" if call.HasField("start_time") else ""
    return f"{wording.clean(call.tool_name)} is {wording.text_at(call, 'state')}{since}  call {call.call_id}"


@command()
async def steps(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    full: Annotated[bool, typer.Option("--full", help="Show each step in full.")] = False,
    number: Annotated[
        int, typer.Option("--round", help="Show only the exact request of this round.", min=0, max=2**31 - 1)
    ] = 0,
    json: Json = False,
) -> None:
    """Show the steps of a run, or the request of one of its model calls.

    One step per line: reasoning, calls, results, questions and answers.
    """
    if number:
        found = await target.round(run_id, number)
        say(console, [json_line(found)] if json else request_lines(found))
        return
    async for page in target.pages(target.agents.ListSteps, steps_pb2.ListStepsRequest(run_id=run_id)):
        for step in page.steps:
            if json:
                print(json_line(step))
            else:
                show_step(console, step, full=full)


def request_lines(found: steps_pb2.GetRoundResponse) -> list[str]:
    """Return the request as indented JSON. The first line says whether it is exactly the request that was sent."""
    sent = f"SHA-256 {found.sent_sha256}" if found.sent_sha256 else "unknown, because the call did not end"
    same = "This request was sent" if found.matches else "This request can differ from the one that was sent"
    heading = f"{same} to {wording.clean(found.model)} ({sent})."
    if found.request_omitted_bytes:
        return [f"{heading} It is too large to show: {found.request_omitted_bytes} bytes."]
    body = msgspec.json.format(found.request_json).decode()
    return [heading, *map(wording.clean, body.splitlines())]


def show_step(console: Console, step: steps_pb2.Step, *, full: bool) -> None:
    name, style = _STEPS[step.type]
    tool = f" {wording.clean(step.tool_name)}" if step.tool_name else ""
    heading = f"{step.round:>3} {name}{tool}{_STATUSES.get(step.status, '')}"
    content = f"{step.content_omitted_bytes} bytes" if step.content_omitted_bytes else step.content
    line = heading if full else f"{heading}: {wording.one_line(content)}"
    console.print(Text(line, style=style), soft_wrap=True)
    say(console, [f"    {each}" for each in wording.clean(content).splitlines()] if full else [])
