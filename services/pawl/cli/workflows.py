from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.agent.v1 import workflow_pb2
from pawl.cli import wording
from pawl.cli.command import command, json_of, object_of, read_file, say
from pawl.cli.contract import Columns, Json, Option, ask, json_line, listing, verb
from pawl.cli.declared import files
from pawl.cli.declared.kinds import Faulty, Workflows
from pawl.cli.executions import execution_lines, follow_execution, hints, node_lines
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient

_BYTES_MAX: Final = 256 * 1024
_NAME: Final = {"name": "name"}
_RUN: Final = {"run": "run_id"}
_KIND: Final = Workflows()
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="YAML or JSON files, or folders.")]
RunOfWorkflow = Annotated[str, typer.Argument(metavar="RUN", help="Id of the workflow run.", show_default=False)]
JsonText = Annotated[
    str, typer.Option("--input", metavar="JSON", help="Input as JSON; @FILE reads a file.", show_default=False)
]
Detach = Annotated[bool, typer.Option("--detach", help="Print the run id and exit.")]

app = typer.Typer(help="Save, start, watch and change workflows.", no_args_is_help=True)


@app.command()
@command()
async def validate(target: AsyncClient, console: Console, file: Files) -> None:
    """Check workflows without saving them. Errors name the file and line."""
    for asked in await _validated(target, file):
        say(console, f"{wording.clean(asked.key.name)} is valid.")


@app.command()
@command()
async def save(target: AsyncClient, console: Console, file: Files) -> None:
    """Save workflows as new versions. Nothing is saved if any file is invalid. Requires the admin role."""
    for asked in await _validated(target, file):
        saved = await _KIND.save(target, asked.definition, exists=False, validate_only=False)
        say(console, wording.clean(f"{asked.key.name}: {saved.outcome}"))


async def _validated(target: AsyncClient, paths: list[Path]) -> list[files.Asked]:
    found, problems = files.read(paths, {"workflow": dict})
    for asked in found:
        try:
            await _KIND.save(target, asked.definition, exists=False, validate_only=True)
        except Faulty as error:
            problems += asked.faults(error.faults)
    if problems:
        raise CommandError("\n".join(problems))
    if empty := sorted({str(path) for path in paths if path.is_file()} - {str(asked.file) for asked in found}):
        raise CommandError(f"No workflow in {', '.join(empty)}: the file is empty.")
    if not found:
        raise CommandError("No workflows found. Files must end with .yaml, .yml or .json.")
    return found


_COLUMNS: Final[Columns] = {
    "workflow": "name",
    "version": "version",
    "nodes": "node_count",
    "tool": "as_tool",
    "saved": "create_time",
    "description": "description",
}
app.command("list")(
    listing(
        workflow_pb2.ListWorkflowsRequest(),
        {},
        "List the store's workflows, by name.",
        _COLUMNS,
        none="There are no workflows.",
    )
)
app.command("versions")(
    listing(
        workflow_pb2.ListWorkflowVersionsRequest(),
        _NAME,
        "List a workflow's versions, newest first. Also works for a deleted workflow.",
        {"version": "version", "saved": "create_time", "by": "create_user_id"},
        none="There are no versions.",
    )
)


@app.command()
@command()
async def show(
    target: AsyncClient,
    console: Console,
    run_id: RunOfWorkflow,
    *,
    node: Annotated[str, typer.Option(help="Show one node with its input and output.", show_default=False)] = "",
    json: Json = False,
) -> int:
    """Show the nodes of a run as a tree, with states, times and progress.

    On a terminal, follows the run until it ends. Ctrl-C does not stop the run.
    """
    if not (json or node) and console.is_terminal:
        return await follow_execution(target, console, run_id)
    waiting = hints(await target.get(run_id))  # Read before the tree, so that the tree is not older.
    execution = await target.workflow_run(run_id).execution(node)
    if json:
        print(json_line(execution))
    elif node:
        say(console, [line for each in execution.nodes for line in node_lines(each)])
    else:
        say(console, execution_lines(execution))
        say(console, waiting.values())
    return 0


@app.command()
@command()
async def run(
    target: AsyncClient,
    console: Console,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the workflow.", show_default=False)],
    *,
    input_json: JsonText = "",
    version: Annotated[int, typer.Option(help="Version; default: the newest.", min=0, show_default=False)] = 0,
    reports_to: Annotated[
        str, typer.Option(help="Conversation that is notified when the run ends.", show_default=False)
    ] = "",
    detach: Detach = False,
) -> int:
    """Start a workflow and follow it. The exit code is 0 if the run completed, otherwise 1."""
    given = object_of(_text(input_json), "--input") if input_json else {}
    started = await target.start_workflow(name, given, version=version, reports_to=reports_to)
    return await _followed(target, console, started.run_id, detach=detach)


@app.command()
@command()
async def rerun(
    target: AsyncClient,
    console: Console,
    run_id: RunOfWorkflow,
    node: Annotated[str, typer.Argument(metavar="NODE", help="Path of the node.", show_default=False)],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would run again.")] = False,
    detach: Detach = False,
) -> int:
    """Rerun a workflow run that has ended, from a node. Reuses the outputs of nodes that do not depend on the node."""
    answer = await ask(target, workflow_pb2.RerunFromRequest(run_id=run_id, node=node, validate_only=dry_run))
    say(console, f"reused: {', '.join(answer.reused_nodes) or 'nothing'}")
    say(console, f"runs again: {', '.join(answer.rerun_nodes)}")
    for call in answer.repeated_effects:
        say(console, wording.clean(f"effect that may happen again: {call.tool_name} ({call.run_id} {call.call_id})"))
    return 0 if dry_run else await _followed(target, console, answer.run.run_id, detach=detach)


async def _followed(target: AsyncClient, console: Console, run_id: str, *, detach: bool) -> int:
    if detach:
        say(console, run_id)
        return 0
    return await follow_execution(target, console, run_id)


app.command("pause")(
    verb(
        workflow_pb2.PauseExecutionRequest(),
        _RUN,
        "Pause a run: running nodes finish, and no node starts until it is resumed.",
        "{run_id} is paused. Resume it with: pawl workflows resume {run_id}",
    )
)
app.command("resume")(verb(workflow_pb2.ResumeExecutionRequest(), _RUN, "Resume a paused run.", "{run_id} continues."))


def _payload(request: workflow_pb2.SendEventRequest, given: str) -> None:
    text = _text(given)
    json_of(text, "--payload")
    request.payload_json = text.encode()


_PAYLOAD: Final = Option(path="payload_json", help="Payload as JSON; @FILE reads a file.", put=_payload)
app.command("event")(
    verb(
        workflow_pb2.SendEventRequest(),
        {
            **_RUN,
            "event": "name",
            "--payload": _PAYLOAD,
            "--id": "event_id",
        },
        "Send an event to the nodes of a run that are waiting for an event with this name.",
        "Sent {name} to {run_id}.",
    )
)


app.command("complete")(
    verb(
        workflow_pb2.SendEventRequest(),
        {"token": "token", "--payload": _PAYLOAD},
        "Send an event to one waiting node by its token.",
        "Sent.",
    )
)
app.command("mermaid")(
    verb(
        workflow_pb2.GetWorkflowRequest(),
        {**_NAME, "--version": "version"},
        "Print a workflow as a Mermaid flowchart.",
        lambda answer, _: answer.mermaid.rstrip("\n"),
    )
)
app.command("delete")(
    verb(
        workflow_pb2.DeleteWorkflowRequest(),
        _NAME,
        "Delete a workflow. No new run starts with it; its current runs continue.",
        "Deleted {name}.",
        confirmation="Delete the workflow {name}?",
    )
)
app.command("schema")(
    verb(
        workflow_pb2.GetWorkflowSchemaRequest(),
        {},
        "Print the JSON Schema of workflow files, which editors use to complete and check them.",
        lambda answer, _: json_module.dumps(json_module.loads(answer.schema_json), indent=2),
    )
)


def _text(given: str) -> str:
    return read_file(Path(given[1:]), _BYTES_MAX + 1).decode(errors="replace") if given.startswith("@") else given
