"""`pawl undo`: takes the effects of a run back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from pawl.agent.v1 import undo_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, new_request_id
from pawl.cli.runs import RunId, follow
from pawl.client import AsyncClient

_GOOD: Final = {
    undo_pb2.UNDO_STATE_UNDONE: ("✓", "undone", "green"),
    undo_pb2.UNDO_STATE_ALREADY_UNDONE: ("✓", "was undone before", "dim"),
    undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE: ("✗", "cannot be undone", "yellow"),
    undo_pb2.UNDO_STATE_NOTHING_TO_UNDO: ("·", "nothing to undo", "dim"),
}
_TOLD: Final = {
    undo_pb2.UNDO_STATE_TO_UNDO: ("↶", "to undo", "cyan"),
    undo_pb2.UNDO_STATE_RUNNING: ("⚙", "is being undone", "cyan"),
    undo_pb2.UNDO_STATE_NEEDS_APPROVAL: ("‖", "waits for somebody", "yellow"),
    undo_pb2.UNDO_STATE_FAILED: ("✗", "could not be undone", "red"),
    **_GOOD,
}


@command()
async def undo(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    call: Annotated[str, typer.Option(help="Undo only this call of the run.")] = "",
    preview: Annotated[bool, typer.Option("--preview", help="Only show what would be undone.")] = False,
    yes: Yes = False,
) -> int:
    """Take the effects of a run back, the last one first.

    Shows what will be undone, and what cannot be; then does it and reports. What
    needs an approval waits for it. Exit code 0 if all that can be undone is undone.
    """
    request = undo_pb2.PreviewUndoRequest(run_id=run_id, call_id=call)
    found = (await target.agents.PreviewUndo(request)).calls
    _show(console, found)
    count = sum(each.state == undo_pb2.UNDO_STATE_TO_UNDO for each in found)
    if not count:
        console.print("Nothing can be undone.", markup=False)
        return 0
    if preview:
        return 0
    if not is_sure(f"Undo {wording.count_text(count, 'call')}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    undoing = await _start(target, run_id, call)
    code = await follow(target, console, undoing, 0)
    report = undo_pb2.GetUndoReportRequest(run_id=undoing)
    found = (await target.agents.GetUndoReport(report)).calls
    _show(console, found)
    return code or (0 if all(each.state in _GOOD for each in found) else EXIT_UNSUCCESSFUL)


async def _start(target: AsyncClient, run_id: str, call_id: str) -> str:
    request_id = new_request_id()
    if call_id:
        one = undo_pb2.UndoCallRequest(request_id=request_id, run_id=run_id, call_id=call_id)
        return (await target.agents.UndoCall(one)).run.run_id
    whole = undo_pb2.UndoRunRequest(request_id=request_id, run_id=run_id)
    return (await target.agents.UndoRun(whole)).run.run_id


def _show(console: Console, found: Iterable[undo_pb2.CallUndo]) -> None:
    for each in found:
        line, style = undo_line(each)
        console.print(Text(line, style=style), soft_wrap=True)


def undo_line(each: undo_pb2.CallUndo) -> tuple[str, str]:
    """Return what an undo means, or has come to, for a call on one line, and its style."""
    mark, words, style = _TOLD[each.state]
    summary = f" ({wording.one_line(each.summary, 200)})" if each.summary else ""
    reason = f": {wording.one_line(each.reason, 300)}" if each.reason else ""
    return f"{mark} {each.call_id or 'earlier calls'}  {wording.clean(each.tool_name)}{summary} {words}{reason}", style
