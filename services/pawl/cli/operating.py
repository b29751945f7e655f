"""Implements the operator commands `pawl attention`, `resolve`, `redrive`, `end` and `undo`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agent_pb2, operator_pb2, undo_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, confirm, json_of, say
from pawl.cli.contract import Json, ask, items, json_line, verb
from pawl.cli.failure import CommandError
from pawl.cli.runs import RunId, follow
from pawl.cli.transcript import Transcript, hint
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2

_REASON: Final = {"run": "run_id", "--reason": "reason"}
_GOOD: Final = {
    undo_pb2.UNDO_STATE_UNDONE: ("✓", "undone", "green"),
    undo_pb2.UNDO_STATE_ALREADY_UNDONE: ("✓", "was already undone", "dim"),
    undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE: ("✗", "cannot be undone", "yellow"),
    undo_pb2.UNDO_STATE_NOTHING_TO_UNDO: ("·", "nothing to undo", "dim"),
}
_UNDO_STATES: Final = {
    undo_pb2.UNDO_STATE_TO_UNDO: ("↶", "to undo", "cyan"),
    undo_pb2.UNDO_STATE_RUNNING: ("⚙", "is being undone", "cyan"),
    undo_pb2.UNDO_STATE_NEEDS_APPROVAL: ("‖", "waits for approval", "yellow"),
    undo_pb2.UNDO_STATE_FAILED: ("✗", "could not be undone", "red"),
    **_GOOD,
}


@command()
async def attention(
    target: AsyncClient,
    console: Console,
    run_id: Annotated[str | None, typer.Argument(help="Only this run.", show_default=False)] = None,
    *,
    json: Json = False,
) -> None:
    """List the runs that need an operator.

    Lists the runs of all the store's users, longest wait first, with the reason and what to do. With API keys, requires
    the operator or admin role.
    """
    if run_id == "":
        raise CommandError("the value must not be empty. Omit the option to include all.", parameter="run_id")
    found = await items(target, operator_pb2.ListAttentionRequest(run_id=run_id or ""))
    if json:
        say(console, map(json_line, found))
    elif not found:
        say(console, f"{run_id} does not need attention." if run_id else "No run needs attention.")
    for run in () if json else found:
        _show(Transcript(console), run)


def _show(transcript: Transcript, run: operator_pb2.RunInNeed) -> None:
    now = datetime.now(tz=UTC)
    lines = [
        wording.attention_text(run.attention, run.crash_count),
        f"user {wording.clean(run.user_id)}, conversation {run.conversation_id}, round {run.round}",
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
        transcript.command(f"fix the cause, then continue the run: pawl redrive {run.run_id}")
    transcript.command(f"or end the run: pawl end {run.run_id}")


@command()
async def resolve(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    call_id: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    *,
    happened: Annotated[str | None, typer.Option(help="It happened, with this JSON value as its result.")] = None,
    run_again: Annotated[bool, typer.Option("--run-again", help="It did not happen; run it again.")] = False,
    tell_model: Annotated[
        bool, typer.Option("--tell-model", help="It did not happen; report this to the model.")
    ] = False,
) -> None:
    """Report the outcome of an uncertain call.

    Works for any user's run that needs attention because a process died during a call. First find out whether the call
    took effect. With API keys, requires the operator or admin role.
    """
    if (happened is not None) + run_again + tell_model != 1:
        raise CommandError("Specify exactly one of --happened JSON, --run-again and --tell-model.")
    request = agent_pb2.ResolveCallRequest(run_id=run_id, call_id=call_id)
    request.resolution = agent_pb2.RESOLUTION_RUN_AGAIN if run_again else agent_pb2.RESOLUTION_TELL_MODEL
    if happened is not None:
        request.resolution = agent_pb2.RESOLUTION_HAPPENED
        json_of(happened, "The result", "Put text in quotes: --happened '\"sent\"'.")
        request.content_json = happened.encode()
    runs = await items(target, operator_pb2.ListAttentionRequest(run_id=run_id))
    # If several calls are large, only the first is listed, but the ledger contains all of them.
    for call in (call for run in runs for call in run.calls if call.call_id == call_id):
        Transcript(console).pending(call)
    await ask(target, request)
    say(console, "Resolved.", "green")


redrive: Final = verb(
    operator_pb2.RedriveRunRequest(),
    _REASON,
    "Continue a quarantined run where it stopped. Fix what killed its workers first. Requires the operator role.",
    lambda answer, request: f"{request.run_id} is {wording.state_name(answer.state)} again.",
)
end: Final = verb(
    operator_pb2.EndRunRequest(),
    _REASON,
    "End any user's run in the store. Its open calls end as with `pawl cancel`. Requires the operator role.",
    lambda answer, request: f"{request.run_id} is {wording.state_name(answer.state)}.",
)


@command()
async def undo(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    call: Annotated[str, typer.Option(help="Undo only this call of the run.")] = "",
    preview: Annotated[bool, typer.Option("--preview", help="Only show what would be undone.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Print the id of the undo's run and exit.")] = False,
    yes: Yes = False,
) -> int:
    """Undo the effects of a run, most recent first.

    Shows what can and cannot be undone, then undoes what it can and reports the results. If undoing a call needs
    approval, this waits for it. The exit code is 0 if everything that can be undone was undone.
    """
    found = await items(target, undo_pb2.PreviewUndoRequest(run_id=run_id, call_id=call))
    _show_undos(console, found)
    count = sum(each.state == undo_pb2.UNDO_STATE_TO_UNDO for each in found)
    if preview or not count:
        say(console, [] if count else "There is nothing to undo.")
        return 0
    if not confirm(f"Undo {wording.count_text(count, 'call')}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    one = undo_pb2.UndoCallRequest(run_id=run_id, call_id=call)
    undoing = (await ask(target, one if call else undo_pb2.UndoRunRequest(run_id=run_id))).run.run_id
    if detach:
        say(console, undoing)
        return 0
    code = await follow(target, console, undoing, 0)
    found = await items(target, undo_pb2.GetUndoReportRequest(run_id=undoing))
    _show_undos(console, found)
    return code or (0 if all(each.state in _GOOD for each in found) else EXIT_UNSUCCESSFUL)


def _show_undos(console: Console, found: Iterable[Any]) -> None:
    for each in found:
        say(console, *undo_line(each))


def undo_line(each: undo_pb2.CallUndo) -> tuple[str, str]:
    mark, words, style = _UNDO_STATES[each.state]
    summary = f" ({wording.one_line(each.summary, 200)})" if each.summary else ""
    reason = f": {wording.one_line(each.reason, 300)}" if each.reason else ""
    return f"{mark} {each.call_id or 'earlier calls'}  {wording.clean(each.tool_name)}{summary} {words}{reason}", style
