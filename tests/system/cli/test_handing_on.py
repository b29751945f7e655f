"""The story of things with names, from the command line: agents that change, conversations that are handed on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cli.conftest import CommandLine
from tests.system.cli.test_commands import pending_call, started

BOOKER = """
name: booker
options: {instructions: You are the booker. For sums ask the agent `summer`.}
tools: {names: [send_email, calculate]}
delegates_to: [summer]
labels: {team: sales}
"""
SUMMER = """
name: summer
options: {instructions: You work out sums.}
tools: {names: [calculate]}
"""
HISTORY = [
    {"role": "user", "content": "How warm is it in Oslo?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "abc", "content": '{"degrees": 12}'},
    {"role": "assistant", "content": "12 degrees, says the thermometer."},
]


@pytest.fixture
def folder(pawl: CommandLine, tmp_path: Path) -> Iterator[Path]:
    agents = tmp_path / "agents"
    agents.mkdir()
    (agents / "booker.yaml").write_text(BOOKER)
    (agents / "summer.yaml").write_text(SUMMER)
    yield agents
    for name in ("booker", "summer"):
        pawl.run("agents", "delete", name, "--yes")


def ids(kind: str, text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(rf"{kind}_\w+", text)))


def test_agents_delegate_and_change_while_conversations_are_imported_forked_and_erased(
    pawl: CommandLine, folder: Path, tmp_path: Path
) -> None:
    saved = pawl.succeed("apply", "-f", str(folder))
    assert saved.index("summer: version 1") < saved.index("booker: version 1")
    assert "booker" in pawl.succeed("agents", "list", "--label", "team=sales")

    # A conversation from elsewhere goes on here, with an agent that has another one work.
    history = tmp_path / "history.json"
    history.write_text(json.dumps(HISTORY))
    (imported,) = ids("conv", pawl.succeed("conversations", "import", str(history), "--key", "weather"))
    asked = 'call run_agent with {"task": "what is 6 * 7?", "agent": "summer"}'
    answer = pawl.succeed(
        "run", "--conversation-key", "weather", "--agent", "booker", "--label", "story=handing-on", asked
    )
    assert "42" in answer
    parent = ids("run", pawl.succeed("runs", "--label", "story=handing-on"))[0]
    below = pawl.succeed("runs", "--parent", parent)
    assert len(ids("run", below)) == 1
    assert ids("run", below) == ids("run", pawl.succeed("runs", "--agent", "summer"))

    # Shared, it is read by others, until it is shared no longer.
    reading = ("--user", "bob", "conversations", "show", imported)
    assert pawl.run(*reading)[0]
    pawl.succeed("conversations", "share", "--key", "weather")
    assert "12 degrees" in pawl.succeed(*reading)
    me = pawl.succeed("whoami").split()[0]
    shared = pawl.succeed("--user", "bob", "conversations", "list", "--shared")
    assert shared.split("\t")[0] == imported
    assert shared.split("\t")[2] == me
    pawl.succeed("conversations", "share", imported, "--private")
    assert pawl.run(*reading)[0]

    # In the middle it is forked, and goes on in another way.
    shown = pawl.succeed("conversations", "show", imported, "--numbers")
    assert "12 degrees" in shown
    assert "6 * 7" in shown
    forked = pawl.succeed("fork", imported, "--at", "3", "what is 400 * 2")
    (fork,) = [found for found in ids("conv", forked) if found != imported]
    assert "800" in forked
    of_fork = pawl.succeed("conversations", "show", fork)
    assert "12 degrees" in of_fork
    assert "6 * 7" not in of_fork

    # The agent changes while a run of its version before waits.
    waiting = started(pawl, "e-mail ann@example.com about lunch: see you at noon", "--agent", "booker")
    call_id = pending_call(pawl, waiting)
    (folder / "booker.yaml").write_text(BOOKER.replace("[send_email, calculate]", "[calculate]"))
    assert "booker: version 2" in pawl.succeed("apply", "-f", str(folder))
    assert "[send_email]" not in pawl.run("run", "--agent", "booker", "e-mail ann@example.com about tea: at four")[1]
    pawl.succeed("approve", waiting, call_id, "--yes")
    told = pawl.succeed("watch", waiting, "--json")
    assert "RUN_STATE_COMPLETED" in told
    (version,) = set(re.findall(r'"agent": \{"name": "booker", "version": (\d+)', told))
    assert version == "1"

    # What is erased is nowhere any more; what the fork has of its own stays.
    pawl.until(lambda told: f"{imported} is erased" in told, "conversations", "erase", imported, "--yes")
    code, _, errors = pawl.run("conversations", "show", imported)
    assert code
    assert "erased" in errors
    of_fork = pawl.succeed("conversations", "show", fork)
    assert "12 degrees" not in of_fork
    assert "800" in of_fork
    assert parent not in pawl.succeed("runs", "--label", "story=handing-on")
