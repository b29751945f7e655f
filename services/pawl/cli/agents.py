from __future__ import annotations

from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.agent.v1 import agents_pb2
from pawl.chassis.ids import DRAFT
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, WithLabels, Yes, command, confirm, labels_of, say
from pawl.cli.contract import Columns, Json, ask, items, listing, show_items, verb, warn_of_set
from pawl.cli.declared.files import to_yaml
from pawl.client import AsyncClient
from pawl.event.v1 import agent_pb2

_NAME: Final = {"name": "name"}


def _tools(agent: agent_pb2.AgentVersion) -> str:
    selected = agent.definition.tools
    is_open = not any((selected.names, selected.sources, selected.patterns))
    return "none" if agent.definition.options.without_tools else "all" if is_open else str(len(agent.tool_names))


def _file(agent: agent_pb2.AgentVersion) -> str:
    return to_yaml("agent", agent.definition, [f"tool: {name}" for name in agent.tool_names])


_AGENT: Final[Columns] = {
    "agent": lambda agent: wording.clean(f"{DRAFT if agent.draft else ''}{agent.definition.name}"),
    "version": lambda agent: str(agent.version) if agent.version else "deployment",
    "tools": _tools,
    "delegates to": "definition.delegates_to",
    "title": "definition.card.title",
}

app = typer.Typer(help="List, show and delete the store's agents.", no_args_is_help=True)
app.command("show")(
    verb(
        agents_pb2.GetAgentRequest(),
        {**_NAME, "--version": "version"},
        "Show an agent as a file for `pawl apply`. Lists the tools selected when it was saved.",
        lambda answer, _: wording.clean(_file(answer.agent)).rstrip("\n"),
    )
)
app.command("versions")(
    listing(
        agents_pb2.ListAgentVersionsRequest(),
        _NAME,
        "List an agent's versions, newest first. Also works for a deleted agent.",
        {"version": "version", "saved": "create_time", "by": "create_user_id"},
        none="There are no versions.",
    )
)


@app.command("list")
@command()
async def list_agents(target: AsyncClient, console: Console, *, label: WithLabels = None, json: Json = False) -> None:
    """List the agents you may use, then your drafts."""
    listed = [agents_pb2.ListAgentsRequest(drafts=drafts, labels=labels_of(label)) for drafts in (False, True)]
    found = [agent for request in listed for agent in await items(target, request) if agent.draft == request.drafts]
    show_items(console, found, _AGENT, none="There are no agents.", json=json)


@app.command()
@command()
async def delete(
    target: AsyncClient,
    console: Console,
    name: Annotated[str, typer.Argument(help="Name of the agent; draft/NAME for one of your drafts.")],
    *,
    yes: Yes = False,
) -> int:
    """Delete an agent, or your draft/NAME. No new run starts with it; its current runs continue."""
    if not confirm(f"Delete the agent {name}?", yes=yes):
        return EXIT_UNSUCCESSFUL
    kind = agents_pb2.DeleteDraftRequest if name.startswith(DRAFT) else agents_pb2.DeleteAgentRequest
    request = kind(name=name.removeprefix(DRAFT))
    await warn_of_set(target, request, await ask(target, request))
    say(console, f"Deleted {wording.one_line(name)}.")
    return 0
