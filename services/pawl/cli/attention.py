"""`pawl attention`, `resolve`, `redrive` and `end`: what operators do about runs that cannot go on by themselves."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, operator_pb2
from pawl.cli import answers, wording
from pawl.cli.command import command, narrows, new_request_id
from pawl.cli.failure import CommandError
from pawl.cli.runs import RunId
from pawl.cli.transcript import Transcript, hint
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2

Reason = Annotated[str, typer.Option(help="For the log of the run.")]


@command()
async def attention(
    target: AsyncClient,
    console: Console,
    run_id: Annotated[str, typer.Argument(help="Only this run.", show_default=False, callback=narrows)] = "",
) -> None:
    """List the runs that need an operator.

    Of all users of the store, the one that has waited longest first, with the
    reason and what to do about it. Needs the role operator or admin where there
    are API keys.
    """
    transcript = Transcript(console)
    runs = await _runs_in_need(target, run_id)
    if not runs:
        console.print(f"{run_id} needs no attention." if run_id else "No run needs attention.", markup=False)
    for run in runs:
        _show(transcript, run)


async def _runs_in_need(target: AsyncClient, run_id: str) -> list[operator_pb2.RunInNeed]:
    """Return the runs of the store that need attention, or the one with this id if it does."""
    pages = target.pages(target.operators.ListAttention, operator_pb2.ListAttentionRequest(run_id=run_id))
    return [run async for page in pages for run in page.runs]


def _show(transcript: Transcript, run: operator_pb2.RunInNeed) -> None:
    """Show why a run needs an operator, the calls in doubt whole, and the commands that help."""
    now = datetime.now(tz=UTC)
    lines = [
        wording.attention_text(run.attention, run.crash_count),
        f"of {wording.clean(run.user_id)}, conversation {run.conversation_id}, in round {run.round}",
        f"since {wording.time_text(run.attention.since_time)}",
    ]
    if run.stop_cause:
        lines.append("it was being stopped")
    for call in run.calls:
        lines += ["", wording.call_title(call), *(f"  {line}" for line in wording.call_lines(call, now))]
    transcript.card(run.run_id, lines, "red")
    for call in run.calls:
        transcript.command(hint(call))
    if run.attention.reason == run_pb2.ATTENTION_REASON_QUARANTINED:
        transcript.command(f"mend what killed them, then let it go on: pawl redrive {run.run_id}")
    transcript.command(f"or end it: pawl end {run.run_id}")


@command()
async def resolve(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    happened: Annotated[str | None, typer.Option(help="It happened; this JSON value is its result.")] = None,
    run_again: Annotated[bool, typer.Option("--run-again", help="It did not happen: run it.")] = False,
    tell_model: Annotated[bool, typer.Option("--tell-model", help="It did not happen: tell the model.")] = False,
) -> None:
    """Say what became of a call in doubt.

    For runs that need attention, of any user of the store: a process died in the
    middle of an effect. Look there whether it happened, then say so. Needs the
    role operator or admin where there are API keys.
    """
    request = _resolution(run_id, call_id, happened, run_again=run_again, tell_model=tell_model)
    runs = await _runs_in_need(target, run_id)
    # Of several large ones only the first is listed; about the others the ledger has the word.
    for call in (call for run in runs for call in run.calls if call.call_id == call_id):
        Transcript(console).pending(call)
    await target.agents.ResolveCall(request)
    console.print("Resolved.", style="green", markup=False)


def _resolution(
    run_id: str, call_id: str, happened: str | None, *, run_again: bool, tell_model: bool
) -> agent_pb2.ResolveCallRequest:
    if (happened is not None) + run_again + tell_model != 1:
        raise CommandError("Give one of --happened JSON, --run-again and --tell-model.")
    request = agent_pb2.ResolveCallRequest(
        request_id=new_request_id(),
        run_id=run_id,
        call_id=call_id,
        resolution=agent_pb2.RESOLUTION_RUN_AGAIN if run_again else agent_pb2.RESOLUTION_TELL_MODEL,
    )
    if happened is not None:
        request.resolution = agent_pb2.RESOLUTION_HAPPENED
        request.content_json = answers.checked_result(happened, "Text needs quotes: --happened '\"sent\"'.")
    return request


@command()
async def redrive(target: AsyncClient, console: Console, run_id: RunId, *, reason: Reason = "") -> None:
    """Let a quarantined run go on.

    From where it was, as if no worker had died with it. Mend first what killed
    them: `pawl attention` lists these runs. Needs the role operator or admin where
    there are API keys.
    """
    request = operator_pb2.RedriveRunRequest(request_id=new_request_id(), run_id=run_id, reason=reason)
    state = (await target.operators.RedriveRun(request)).state
    console.print(f"{run_id} is {wording.state_name(state)} again.", markup=False)


@command()
async def end(target: AsyncClient, console: Console, run_id: RunId, *, reason: Reason = "") -> None:
    """End a run of any user of the store.

    Open calls are settled as with `pawl cancel`. Needs the role operator or admin
    where there are API keys.
    """
    request = operator_pb2.EndRunRequest(request_id=new_request_id(), run_id=run_id, reason=reason)
    state = (await target.operators.EndRun(request)).state
    console.print(f"{run_id} is {wording.state_name(state)}.", markup=False)
