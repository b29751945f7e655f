"""`pawl run`, `watch`, `runs` and `cancel`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from google.protobuf.json_format import MessageToJson
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from pawl.agent.v1 import agent_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, follows, narrows, read_file, seconds_of
from pawl.cli.failure import CommandError
from pawl.cli.transcript import ENDED, Transcript, decides, hint
from pawl.client import AsyncClient, file, form, image
from pawl.client.forms import IMAGE_BYTES_MAX, SCHEMA_BYTES_MAX
from pawl.errors import PawlError
from pawl.event.v1 import event_pb2, gap_pb2, run_pb2

Json = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show the model's reasoning whole.")]
Agent = Annotated[str, typer.Option(help="Agent of the store; 'default' if not given.")]
Labels = Annotated[list[str] | None, typer.Option("--label", help="A label: key=value. Repeatable.")]
WithLabels = Annotated[list[str] | None, typer.Option("--label", help="Only with this label: key=value. Repeatable.")]
RunId = Annotated[str, typer.Argument(help="Id of the run.", show_default=False)]

ConversationKey = Annotated[
    str,
    typer.Option(
        "--conversation-key", help="Go on with your conversation of this key, or begin it: any text of up to 200 bytes."
    ),
]

_WIDE: Final = 120
_GAP: Final = 2
_LAST_WIDTH_MIN: Final = 8
_POLL_SECONDS: Final = 1.0
_TOKENS_MAX: Final = 2**63 - 1


class Thinking(StrEnum):
    """The thinking of a model, as people type it."""

    NONE = "none"
    MINIMAL = "minimal"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    XHIGH = "xhigh"
    MAX = "max"


Effort = Annotated[Thinking | None, typer.Option(help="How much the model thinks.", show_default=False)]


class Wait(StrEnum):
    """The things that a run waits for, as people type them."""

    TOOL_RESULT = "tool-result"
    APPROVAL = "approval"
    ANSWER = "answer"
    BUDGET = "budget"
    AGENT = "agent"
    AGENT_QUOTA = "agent-quota"
    TIME = "time"
    PROVIDER = "provider"


class State(StrEnum):
    """The states of a run, as people type them."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING = "waiting"
    CANCELLING = "cancelling"
    NEEDS_ATTENTION = "needs-attention"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@command()
async def run(
    target: AsyncClient,
    console: Console,
    text: Annotated[str, typer.Argument(help="What the agent is to do.", show_default=False)],
    *,
    conversation: Annotated[str, typer.Option(help="Go on with this conversation.")] = "",
    conversation_key: ConversationKey = "",
    agent: Agent = "",
    label: Labels = None,
    model: Annotated[str, typer.Option(help="Model to use instead of the deployment's.")] = "",
    tokens_max: Annotated[
        int, typer.Option(help="Tokens that it may use; 0 for the deployment's budget.", min=0, max=_TOKENS_MAX)
    ] = 0,
    images: Annotated[
        list[Path] | None,
        typer.Option("--image", help="An image that goes with the message. Repeatable.", show_default=False),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", help="A document of yours that goes with it, by name. Repeatable.", show_default=False),
    ] = None,
    shared_files: Annotated[
        list[str] | None,
        typer.Option("--shared-file", help="The same of a document of the store. Repeatable.", show_default=False),
    ] = None,
    tools: Annotated[
        str, typer.Option(help="Names of the tools that it may call, with commas between; all if not given.")
    ] = "",
    effort: Effort = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A file with the JSON Schema that the answer is to fit.", show_default=False),
    ] = None,
    no_background: Annotated[bool, typer.Option("--no-background", help="Let no calls run in the background.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the run's id and leave.")] = False,
    json: Json = False,
    reasoning: Reasoning = False,
) -> int:
    """Start a run and watch it.

    Exit code 0 if it completed, 1 if it ended otherwise. Ctrl-C stops the watching, not the run.
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
        # Not among the events or the id that others read.
        typer.echo(f"queued, place {started.queue_position}", err=True)
    if detach:
        console.print(started.run_id)
        return 0
    return await follow(target, console, started.run_id, 0, json=json, reasoning=reasoning)


def effort_of(effort: Thinking | None) -> run_pb2.ReasoningEffort.ValueType:
    """Return an effort as the contract has it."""
    return run_pb2.ReasoningEffort.Value(f"REASONING_EFFORT_{effort.name if effort else 'UNSPECIFIED'}")


@command()
async def watch(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    after: Annotated[int, typer.Option(help="Events after this number only.", min=0)] = 0,
    json: Json = False,
    reasoning: Reasoning = False,
) -> int:
    """Watch a run.

    From its first event, or the one after `--after`, to its last; exit code as with `run`.
    """
    return await follow(target, console, run_id, after, json=json, reasoning=reasoning)


async def follow(
    target: AsyncClient, console: Console, run_id: str, after_seq: int, *, json: bool = False, reasoning: bool = False
) -> int:
    """Show a run after an event to its end; returns the exit code."""
    follows(target)
    transcript = Transcript(console, whole_reasoning=reasoning, hints=True)
    below = _Below(target, transcript, run_id)
    state = run_pb2.RUN_STATE_UNSPECIFIED
    try:
        async for event in target.watch(run_id, after_seq):
            if isinstance(event, event_pb2.RunEvent) and event.HasField("run_changed"):
                state = event.run_changed.run.state
                if not json:
                    await below.note(event.run_changed.run)
            if json:
                print(event_line(event), flush=True)
            elif isinstance(event, gap_pb2.Gap):
                transcript.show_gap(event)
            else:
                transcript.show(event)
    except asyncio.CancelledError:
        if not json:
            transcript.line(f"The run goes on. Watch it again with: pawl watch {run_id}", "dim")
        raise
    finally:
        await below.close()
        transcript.end_line()
    if state not in ENDED:  # Attached after its last event.
        found = await target.get(run_id)
        state = found.state
        if said := wording.imported_text(found):
            typer.echo(said, err=json)
    return 0 if state == run_pb2.RUN_STATE_COMPLETED else EXIT_UNSUCCESSFUL


class _Below:
    """The waits of the runs below a watched one, of runs that do its calls and of calls of theirs.

    Shows, while it waits for others, what they wait for, each call once. Its task ends with `close`.
    """

    def __init__(self, target: AsyncClient, transcript: Transcript, run_id: str) -> None:
        self._target = target
        self._transcript = transcript
        self._run_id = run_id
        self._shown: set[tuple[str, int]] = set()
        self._task: asyncio.Task[None] | None = None

    async def note(self, run: run_pb2.Run) -> None:
        """Take note of the state of the run."""
        waits = run.state == run_pb2.RUN_STATE_WAITING and run_pb2.WAIT_KIND_AGENT in run.waits
        if not waits:
            await self.close()
        elif self._task is None:
            self._task = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Look no more."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _look(self) -> None:
        while True:
            try:
                run = await self._target.get(self._run_id)
            except PawlError:
                run = run_pb2.Run()  # Whoever watches says so, or it passes.
            for call in run.pending_calls:
                key = (call.call_id, call.state)
                if call.run_id != self._run_id and key not in self._shown:
                    self._shown.add(key)
                    self._transcript.pending(call)
                    self._transcript.command(hint(call, decides=decides(run)))
            await asyncio.sleep(_POLL_SECONDS)


def event_line(event: event_pb2.RunEvent | gap_pb2.Gap) -> str:
    """Return an event, or the gap that stands for some, as one line of the JSON that protobuf defines."""
    return MessageToJson(event, preserving_proto_field_name=True, indent=None)


@command()
async def runs(
    target: AsyncClient,
    console: Console,
    *,
    conversation: Annotated[str, typer.Option(help="Only those of this conversation.", callback=narrows)] = "",
    state: Annotated[
        list[State] | None, typer.Option("--state", help="Only those in this state. Repeatable.", show_default=False)
    ] = None,
    wait: Annotated[
        list[Wait] | None, typer.Option("--wait", help="Only those that wait for this. Repeatable.", show_default=False)
    ] = None,
    parent: Annotated[str, typer.Option(help="Only those that do calls of this run.", callback=narrows)] = "",
    agent: Annotated[str, typer.Option(help="Only those of this agent.", callback=narrows)] = "",
    label: WithLabels = None,
    since: Annotated[str, typer.Option(help="Only those created in the last 30m, 2h or 7d.", show_default=False)] = "",
    oldest: Annotated[bool, typer.Option("--oldest", help="The oldest first.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)] = 20,
) -> None:
    """List your runs, newest first."""
    request = agent_pb2.ListRunsRequest(
        page_size=count,
        conversation_id=conversation,
        states=[run_pb2.RunState.Value(f"RUN_STATE_{each.name}") for each in state or ()],
        waits=[run_pb2.WaitKind.Value(f"WAIT_KIND_{each.name}") for each in wait or ()],
        parent_run_id=parent,
        agent=agent,
        labels=labels_of(label),
        order=agent_pb2.RUN_ORDER_OLDEST_FIRST if oldest else agent_pb2.RUN_ORDER_NEWEST_FIRST,
    )
    if since:
        request.create_time_from.FromMicroseconds(int(max(0.0, time.time() - seconds_of(since, "since")) * 1e6))
    page = await target.agents.ListRuns(request)
    if not page.runs and (conversation or state or wait or parent or agent or label or since):
        console.print("There are no such runs.")
        return
    if not page.runs:
        console.print('You have no runs. Start one with `pawl run "what is 17 * 23"`.', markup=False)
        return
    show_runs(console, list(page.runs))


def labels_of(texts: Sequence[str] | None) -> dict[str, str]:
    """Return labels that were given as key=value.

    Raises:
        CommandError: one is not of this form, or a key comes twice.
    """
    labels: dict[str, str] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or key in labels:
            raise CommandError(f"{text!r} is not of the form key=value, or its key comes twice.", parameter="labels")
        labels[key] = value
    return labels


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels on one line, for people."""
    return ", ".join(f"{key}={wording.clean(value)}" for key, value in sorted(labels.items()))


def show_runs(console: Console, found: list[run_pb2.Run]) -> None:
    """Print runs: a table on a terminal, lines with tabs elsewhere. A narrow terminal has no room for conversations."""
    narrow = console.is_terminal and console.width < _WIDE
    headings = ("run", "state", "created", *(() if narrow else ("conversation",)), "output")
    rows = [
        (
            run.run_id,
            _state_and_waits(run),
            wording.time_text(run.create_time),
            *(() if narrow else (run.conversation_id,)),
            wording.one_line(run.output_text),
        )
        for run in found
    ]
    show_table(console, headings, rows)


def show_table(console: Console, headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows: a table on a terminal, lines with tabs elsewhere, for other programs.

    Where a terminal is too narrow for that each cell has a line of its own, so that no id is cut.
    """
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    widths = (max(map(cell_len, column)) for column in list(zip(headings, *rows, strict=True))[:-1])
    if rows and sum(width + _GAP for width in widths) + _LAST_WIDTH_MIN > console.width:
        for row in rows:
            lines = (f"  {heading}: {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell)
            console.print("\n".join([row[0], *lines]), markup=False, soft_wrap=True)
        return
    table = Table(box=None, pad_edge=False, expand=True)
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table)


def _state_and_waits(run: run_pb2.Run) -> str:
    name = wording.state_name(run.state)
    if run.waits:
        return f"{name} for {wording.wait_names(run.waits)}"
    waits = wording.QUEUED_FOR.get(run.waiting.reason, "")
    return f"{name} for {waits}" if waits else name


@command()
async def top_up(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    tokens: Annotated[int, typer.Argument(help="How many to add.", min=1, max=_TOKENS_MAX, show_default=False)],
) -> None:
    """Add tokens to the budget of a run. It goes on if it waits for them."""
    run = await target.top_up(run_id, tokens)
    console.print(f"{run_id} {wording.budget_text(run)}.", markup=False)


@command()
async def cancel(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    jobs: Annotated[bool, typer.Option("--jobs", help="Also the jobs that it began, which go on otherwise.")] = False,
    reason: Annotated[str, typer.Option(help="For the log and the model.")] = "",
) -> None:
    """Stop a run. One that has ended stays as it is."""
    request = agent_pb2.CancelRunRequest(run_id=run_id, reason=reason, cancel_jobs=jobs)
    answer = await target.once(target.agents.CancelRun, request)
    console.print(f"{run_id} is {wording.state_name(answer.run.state)}.", markup=False)
    for job in answer.jobs:
        goes_on = f"{wording.job_name(job)} goes on; to end it: pawl jobs stop {job.job_id}"
        console.print(wording.stopped_text(job) if jobs else goes_on, markup=False, soft_wrap=True)
