"""`pawl memory`: the facts that agents remember about you."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from pawl.agent.v1 import agents_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, Yes, command, is_sure, narrows
from pawl.cli.failure import CommandError
from pawl.cli.runs import show_table
from pawl.client import AsyncClient
from pawl.tool.v1 import memory_pb2

commands = typer.Typer(name="memory", help="Look at and erase what agents remember about you.", no_args_is_help=True)

Agent = Annotated[
    str, typer.Option("--agent", help="Only what this agent remembers; that of all if not given.", callback=narrows)
]


@commands.command(name="list")
@command(asks="tools")
async def list_memories(target: AsyncClient, console: Console, *, agent: Agent = "") -> None:
    """List what agents remember about you, the oldest first."""
    request = memory_pb2.ListMemoriesRequest(agent_name=agent)
    found = [memory async for page in target.pages(target.memories.ListMemories, request) for memory in page.memories]
    if agent and not found:
        await target.agent_register.GetAgent(agents_pb2.GetAgentRequest(name=agent))
    if found or not console.is_terminal:
        show_table(console, ("agent", "remembered", "id", "what"), [_row(each) for each in found])
    else:
        console.print("Nothing is remembered about you.")


@commands.command()
@command(asks="tools")
async def erase(
    target: AsyncClient,
    console: Console,
    memory_id: Annotated[
        str, typer.Argument(help="Only this one, as `pawl memory list` shows it.", callback=narrows)
    ] = "",
    *,
    agent: Agent = "",
    yes: Yes = False,
) -> int:
    """Erase what agents remember about you: all of it, what one agent does, or one memory."""
    what = f"the memory {memory_id}" if memory_id else "everything"
    whose = f"the agent {agent} remembers" if agent else "agents remember"
    if not is_sure(f"Erase {what} that {whose} about you?", yes=yes):
        return EXIT_UNSUCCESSFUL
    request = memory_pb2.EraseMemoriesRequest(agent_name=agent, memory_id=memory_id)
    erased = (await target.memories.EraseMemories(request)).erased_count
    if memory_id and not erased:
        raise CommandError("No such memory, or none about you. `pawl memory list` lists those that there are.")
    if agent and not erased:
        await target.agent_register.GetAgent(agents_pb2.GetAgentRequest(name=agent))
    console.print(f"Erased {erased} {'memory' if erased == 1 else 'memories'}.")
    return 0


def _row(memory: memory_pb2.Memory) -> tuple[str, ...]:
    return (
        wording.clean(memory.agent_name),
        wording.time_text(memory.create_time),
        wording.clean(memory.memory_id),
        wording.one_line(memory.text, 1000),
    )
