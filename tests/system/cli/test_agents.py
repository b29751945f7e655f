"""Agents, conversations and content on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.images import PNG
from tests.system.cli.conftest import CommandLine

CLERK = """
name: clerk
options: {instructions: You are the clerk. For sums ask the agent `counter`.}
tools: {names: [send_email], patterns: ["get_current_*", "gone_*"]}
delegates_to: [counter]
labels: {team: sales}
card: {title: Clerk}
---
name: counter
options: {instructions: You work out sums.}
tools: {names: [calculate]}
"""
SUMS = """
name: sums
options:
  reasoning_effort: REASONING_EFFORT_HIGH
  response_format:
    name: sum
    schema: {type: object, properties: {answer: {type: string}}, required: [answer]}
tools: {names: [calculate]}
"""
DELEGATE = 'call run_agent with {"task": "what is 6 * 7?", "agent": "counter"}'
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
def files(pawl: CommandLine, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "all.yaml").write_text(CLERK)
    yield folder
    for name in ("clerk", "counter"):
        pawl.run("agents", "delete", name, "--yes")


def test_apply_is_idempotent_and_accepts_the_output_of_show(pawl: CommandLine, files: Path) -> None:
    dry = pawl.succeed("apply", "-f", str(files), "--dry-run")
    assert "+delegates_to:" in dry
    assert "clerk " not in pawl.succeed("agents", "list")
    saved = pawl.succeed("apply", "-f", str(files))
    assert saved.index("counter: version") < saved.index("clerk: version"), "delegates first"
    assert "warning: gone_* matches no available tool" in saved
    assert pawl.succeed("apply", "-f", str(files)).count("unchanged") == 2
    (files / "all.yaml").write_text(CLERK.replace("the clerk", "a clerk"))
    changed = pawl.succeed("apply", "-f", str(files))
    assert re.search(r"-  instructions: .*You are the clerk.*\n *\+  instructions: .*You are a clerk", changed)
    shown = pawl.succeed("agents", "show", "clerk")
    assert "round_limit_policy" not in shown, "unset options are not shown"
    assert "`pawl agents list`" in pawl.refuse("agents", "show", "clerk", "--version", "900")
    (files / "again").mkdir()
    (files / "again" / "clerk.yaml").write_text(shown)
    assert "clerk: unchanged" in pawl.succeed("apply", "-f", str(files / "again"))


def test_invalid_agent_files_are_refused_with_a_clear_error(pawl: CommandLine, tmp_path: Path) -> None:
    for content, reported in (
        ("name: [", "is not YAML"),
        ("name: clerk\noptions: {instruction: typo}", 'no field named "instruction"'),
        ("name: a\ndelegates_to: [b]\n---\nname: b\ndelegates_to: [a]", "in a cycle"),
        ("name: a\n---\nname: a", "agent 'a' is defined twice"),
        ("name: a\nname: b", "'name' is defined twice"),
        ("name: a\ntools: {names: [fly]}", "there is no tool 'fly'"),
        ("name: a\ndelegates_to: [nobody]", "agent 'nobody' does not exist"),
        (SUMS.replace("type: object, prop", "type: array, prop"), '"type": "object"'),
    ):
        (tmp_path / "bad.yaml").write_text(content)
        assert reported in pawl.refuse("apply", "-f", str(tmp_path)), content


def test_configured_agents_exist_and_default_can_be_replaced(pawl: CommandLine, tmp_path: Path) -> None:
    screen = pawl.data.parent / "screen"
    pawl.until(lambda _: "PAWL_AGENTS: greeter: version 1" in screen.read_text(), "agents", "list")
    assert "Greet people." in pawl.succeed("agents", "show", "greeter")
    assert "When to ask" in pawl.succeed("agents", "show", "default")
    (tmp_path / "default.yaml").write_text("name: default\noptions: {instructions: Be brief.}\n")
    try:
        pawl.succeed("apply", "-f", str(tmp_path / "default.yaml"))
        assert '"name": "default"' in pawl.succeed("watch", pawl.done("what is 17 * 23"), "--json")
    finally:
        pawl.succeed("agents", "delete", "default", "--yes")
    assert "When to ask" in pawl.succeed("agents", "show", "default")


def test_conversation_is_imported_delegated_shared_forked_and_erased(
    pawl: CommandLine, files: Path, tmp_path: Path
) -> None:
    def ids(kind: str, text: str) -> list[str]:
        return list(dict.fromkeys(re.findall(rf"{kind}_\w+", text)))

    pawl.succeed("apply", "-f", str(files))
    assert "clerk" in pawl.succeed("agents", "list", "--label", "team=sales")
    history = tmp_path / "history.json"
    history.write_text(json.dumps(HISTORY))
    (imported,) = ids("conv", pawl.succeed("conversations", "import", str(history), "--key", "weather"))
    of_story = ("--label", "story=handing-on")
    assert "42" in pawl.succeed("run", "--conversation-key", "weather", "--agent", "clerk", *of_story, DELEGATE)
    parent = ids("run", pawl.succeed("runs", *of_story))[0]
    (child,) = ids("run", pawl.succeed("runs", "--parent", parent))
    assert ids("run", pawl.succeed("runs", "--agent", "counter")) == [child]
    assert "calculate" in pawl.succeed("watch", child, "--json")
    # Others can read it while it is shared.
    bob = pawl.user("bob")
    assert bob.run("conversations", "show", imported)[0]
    pawl.succeed("conversations", "share", "--key", "weather")
    assert "12 degrees" in bob.succeed("conversations", "show", imported)
    shared = bob.succeed("conversations", "list", "--shared").split("\t")
    assert (shared[0], shared[2]) == (imported, pawl.succeed("whoami").split()[0])
    pawl.succeed("conversations", "share", imported, "--private")
    assert bob.run("conversations", "show", imported)[0]
    # A fork in the middle continues in another way.
    shown = pawl.succeed("conversations", "show", imported, "--numbers")
    assert ("12 degrees" in shown, "6 * 7" in shown) == (True, True)
    forked = pawl.succeed("fork", imported, "--at", "3", "what is 400 * 2")
    assert "800" in forked
    (fork,) = [found for found in ids("conv", forked) if found != imported]
    of_fork = pawl.succeed("conversations", "show", fork)
    assert ("12 degrees" in of_fork, "6 * 7" in of_fork) == (True, False)
    # An erased conversation is gone everywhere; the fork keeps its own messages.
    pawl.until(lambda reported: f"{imported} is erased" in reported, "conversations", "erase", imported, "--yes")
    code, _, errors = pawl.run("conversations", "show", imported)
    assert code
    assert "erased" in errors
    of_fork = pawl.succeed("conversations", "show", fork)
    assert ("12 degrees" in of_fork, "800" in of_fork) == (False, True)
    assert parent not in pawl.succeed("runs", *of_story)


def test_documents_and_files_are_added_searched_attached_and_removed(pawl: CommandLine, tmp_path: Path) -> None:
    """TOOL-7: images are accepted only if the model accepts images."""
    file = tmp_path / "menu.txt"
    file.write_text("Grüße: marzipan at noon", encoding="utf-8")
    assert pawl.succeed("documents", "add", str(file)) == "Added menu.txt.\n"
    assert pawl.succeed("documents", "add", str(file), "--shared", "--name", "House menu") == "Added House menu.\n"
    file.write_text("marzipan at one", encoding="utf-8")
    assert pawl.succeed("documents", "add", str(file)) == "Replaced menu.txt.\n"
    rows = [line.split("\t") for line in pawl.succeed("documents", "list").splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("store", "25", "House menu"), ("you", "15", "menu.txt")]
    assert "marzipan" in pawl.succeed("run", 'call search_documents with {"query": "marzipan"}')
    assert "[menu.txt, 15 bytes]" in pawl.succeed("run", "who are you?", "--file", "menu.txt")
    (tmp_path / "dot.png").write_bytes(PNG)
    assert "PAWL_MODEL_INPUT" in pawl.refuse("run", "look", "--image", str(tmp_path / "dot.png"))
    pawl.succeed("documents", "remove", "menu.txt")
    assert "`pawl documents list`" in pawl.refuse("documents", "remove", "menu.txt")
    file.write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text" in pawl.refuse("documents", "add", str(file))
    pawl.succeed("run", 'call write_file with {"path": "notes/plan.md", "content": "marzipan"}')
    (written,) = (pawl.data / "files").glob("*/notes/plan.md")
    assert written.read_text() == "marzipan"
    assert "marzipan" in pawl.succeed("run", 'call read_file with {"path": "notes/plan.md"}')
