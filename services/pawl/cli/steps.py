"""`pawl steps`: what a run did, step by step."""

from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from pawl.agent.v1 import steps_pb2
from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.runs import RunId
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2

_FOLDED_CHARACTERS_MAX: Final = 100
_TYPES: Final = {
    steps_pb2.STEP_TYPE_REASONING: ("reasoning", "dim italic"),
    steps_pb2.STEP_TYPE_PLANNING: ("planning", ""),
    steps_pb2.STEP_TYPE_TOOL_CALL: ("call", "cyan"),
    steps_pb2.STEP_TYPE_RESULT: ("result", "green"),
    steps_pb2.STEP_TYPE_QUESTION: ("question", "yellow"),
    steps_pb2.STEP_TYPE_ANSWER: ("answer", "bold"),
}
_STATUSES: Final = {
    steps_pb2.STEP_STATUS_ACTIVE: " (under way)",
    steps_pb2.STEP_STATUS_WAITING: " (waits)",
    steps_pb2.STEP_STATUS_FAILED: " (failed)",
    steps_pb2.STEP_STATUS_STOPPED: " (stopped)",
}


@command()
async def steps(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    full: Annotated[bool, typer.Option("--full", help="Show each step whole.")] = False,
) -> None:
    """Show what a run did, a line for each step: reasoning, calls, results, questions, answers."""
    is_empty = True
    async for page in target.pages(target.agents.ListSteps, steps_pb2.ListStepsRequest(run_id=run_id)):
        for step in page.steps:
            if is_empty and step.round > 1 and (said := trimmed_text(await target.get(run_id))):
                console.print(Text(said, style="dim"), soft_wrap=True)
            show(console, step, full=full)
            is_empty = False
    if is_empty and (said := wording.imported_text(await target.get(run_id))):
        console.print(said, markup=False, soft_wrap=True)


def trimmed_text(run: run_pb2.Run) -> str:
    """Return what is not kept of a run any more; empty if all is."""
    count = run.trimmed_rounds
    return f"… the first {wording.count_text(count, 'iteration')} are not kept any more" if count else ""


def show(console: Console, step: steps_pb2.Step, *, full: bool) -> None:
    """Print a step: on one line, or with all of its content below its heading."""
    name, style = _TYPES[step.type]
    tool = f" {wording.clean(step.tool_name)}" if step.tool_name else ""
    heading = f"{step.round:>3} {name}{tool}{_STATUSES.get(step.status, '')}"
    content = f"{step.content_omitted_bytes} bytes" if step.content_omitted_bytes else step.content
    if full:
        console.print(Text(heading, style=style), soft_wrap=True)
        for line in wording.clean(content).splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
    else:
        folded = wording.one_line(content, _FOLDED_CHARACTERS_MAX)
        console.print(Text(f"{heading}: {folded}", style=style), soft_wrap=True)
