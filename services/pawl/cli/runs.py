"""`pawl run`, `watch`, `runs` and `cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Final

import grpc
import typer
from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from pawl.agent.v1 import agent_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, command, new_request_id
from pawl.cli.target import Target
from pawl.cli.transcript import ENDED, Transcript, decides, hint
from pawl.cli.watching import watch as watch_events
from pawl.event.v1 import event_pb2, gap_pb2, run_pb2

Json = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]
Reasoning = Annotated[bool, typer.Option("--reasoning", help="Show the model's reasoning whole.")]
RunId = Annotated[str, typer.Argument(help="Id of the run.", show_default=False)]

_WIDE: Final = 120
_POLL_SECONDS: Final = 1.0
_TOKENS_MAX: Final = 2**63 - 1


@command()
async def run(
    target: Target,
    console: Console,
    text: Annotated[str, typer.Argument(help="What the agent is to do.", show_default=False)],
    *,
    conversation: Annotated[str, typer.Option(help="Go on with this conversation.")] = "",
    model: Annotated[str, typer.Option(help="Model to use instead of the deployment's.")] = "",
    tokens_max: Annotated[
        int, typer.Option(help="Tokens that it may use; 0 for the deployment's budget.", min=0, max=_TOKENS_MAX)
    ] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Print the run's id and leave.")] = False,
    json: Json = False,
    reasoning: Reasoning = False,
) -> int:
    """Start a run and watch it.

    Exit code 0 if it completed, 1 if it ended otherwise. Ctrl-C stops the watching, not the run.
    """
    request = agent_pb2.StartRunRequest(
        request_id=new_request_id(),
        conversation_id=conversation,
        text=text,
        options=run_pb2.RunOptions(model=model),
    )
    if tokens_max:
        request.options.limits.total_tokens_max = tokens_max
    started = (await target.agents.StartRun(request)).run
    if started.queue_position:
        # Not among the events or the id that others read.
        typer.echo(f"queued, place {started.queue_position}", err=True)
    if detach:
        console.print(started.run_id)
        return 0
    return await follow(target, console, started.run_id, 0, json=json, reasoning=reasoning)


@command()
async def watch(
    target: Target,
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
    target: Target, console: Console, run_id: str, after_seq: int, *, json: bool = False, reasoning: bool = False
) -> int:
    """Show a run after an event to its end; returns the exit code."""
    transcript = Transcript(console, whole_reasoning=reasoning, hints=True)
    below = _Below(target, transcript, run_id)
    state = run_pb2.RUN_STATE_UNSPECIFIED
    try:
        async for event in watch_events(target, run_id, after_seq):
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
        request = agent_pb2.GetRunRequest(run_id=run_id)
        state = (await target.agents.GetRun(request)).run.state
    return 0 if state == run_pb2.RUN_STATE_COMPLETED else EXIT_UNSUCCESSFUL


class _Below:
    """The waits of the runs below a watched one, of runs that do its calls and of calls of theirs.

    Shows, while it waits for others, what they wait for, each call once. Its task ends with `close`.
    """

    def __init__(self, target: Target, transcript: Transcript, run_id: str) -> None:
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
            request = agent_pb2.GetRunRequest(run_id=self._run_id)
            try:
                run = (await self._target.agents.GetRun(request)).run
            except grpc.aio.AioRpcError:
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
    target: Target,
    console: Console,
    *,
    conversation: Annotated[str, typer.Option(help="Only those of this conversation.")] = "",
    count: Annotated[int, typer.Option("--count", "-n", help="At most so many.", min=1, max=200)] = 20,
) -> None:
    """List your runs, newest first."""
    request = agent_pb2.ListRunsRequest(page_size=count, conversation_id=conversation)
    page = await target.agents.ListRuns(request)
    if not page.runs:
        console.print('You have no runs. Start one with `pawl run "what is 17 * 23"`.', markup=False)
        return
    show_runs(console, list(page.runs))


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
    """Print rows: a table on a terminal, lines with tabs elsewhere, for other programs."""
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
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
    return f"{name} for {wording.wait_names(run.waits)}" if run.waits else name


@command()
async def top_up(
    target: Target,
    console: Console,
    run_id: RunId,
    tokens: Annotated[int, typer.Argument(help="How many to add.", min=1, max=_TOKENS_MAX, show_default=False)],
) -> None:
    """Add tokens to the budget of a run. It goes on if it waits for them."""
    request = agent_pb2.TopUpRunRequest(request_id=new_request_id(), run_id=run_id, tokens=tokens)
    run = (await target.agents.TopUpRun(request)).run
    console.print(f"{run_id} {wording.budget_text(run)}.", markup=False)


@command()
async def cancel(
    target: Target,
    console: Console,
    run_id: RunId,
    *,
    reason: Annotated[str, typer.Option(help="For the log and the model.")] = "",
) -> None:
    """Stop a run. One that has ended stays as it is."""
    request = agent_pb2.CancelRunRequest(request_id=new_request_id(), run_id=run_id, reason=reason)
    stopped = (await target.agents.CancelRun(request)).run
    console.print(f"{run_id} is {wording.state_name(stopped.state)}.", markup=False)
