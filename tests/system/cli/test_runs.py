"""Runs, agents, conversations and content on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.images import PNG
from tests.system.cli.conftest import CommandLine

ROOT = Path(__file__).parents[3]


def line_of(run_id: str, runs: str) -> str:
    return next((line for line in runs.splitlines() if line.startswith(run_id)), "")


def test_first_program_of_the_readme_works(pawl: CommandLine, tmp_path: Path) -> None:
    """The program finds the suite and the key where `pawl up` keeps them."""
    program = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / ".pawl").symlink_to(pawl.data)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    assert "391" in done.stdout
    assert done.stderr == ""


def test_run_is_shown_and_json_output_is_its_log_from_any_seq(pawl: CommandLine) -> None:
    """EVT-1: watching the run again prints the same lines."""
    output = pawl.succeed("run", "what is 17 * 23")
    assert "calculate" in output
    assert "391" in output
    assert "completed" in output.splitlines()[-1]
    lines = pawl.succeed("run", "--json", "what time is it in Oslo").splitlines()
    events = [json.loads(line) for line in lines]
    assert [int(event["seq"]) for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "run.completed"
    assert pawl.succeed("watch", "--json", events[0]["run_id"]).splitlines() == lines
    assert pawl.succeed("watch", "--json", events[0]["run_id"], "--after", "3").splitlines() == lines[3:]


def test_steps_of_a_run_show_reasoning_folded_and_in_full(pawl: CommandLine) -> None:
    """HITL-8: requests without tools have steps too."""
    for prompt, kinds in (
        ("what is 17 * 23", ["reasoning", "planning", "call", "result", "reasoning", "answer"]),
        ("hello", ["reasoning", "answer"]),
    ):
        run_id = pawl.done(prompt)
        folded = pawl.succeed("steps", run_id).splitlines()
        assert [line.split(":")[0].split()[1] for line in folded] == kinds
        whole = pawl.succeed("steps", run_id, "--full")
        assert "The prompt" in whole
        assert len(whole.splitlines()) > len(folded)


def test_run_is_undone_after_approval_unless_it_was_read_only(
    pawl: CommandLine,
) -> None:
    """HITL-7: an undo is previewed and reported. HITL-3: without a terminal to confirm, nothing is approved."""
    run_id = pawl.done("add task Paint the fence")
    assert "create_task (Delete the task 'Paint the fence') to undo" in pawl.succeed("undo", run_id, "--preview")
    code, _, errors = pawl.run("undo", run_id, keyboard="y\n")
    assert (code, "no terminal to ask" in errors) == (2, True)
    with ThreadPoolExecutor() as beside:
        undoing = beside.submit(pawl.succeed, "undo", run_id, "--yes")
        found = None
        while found is None and not undoing.done():
            found = re.search(r"run (run_\w+)  call (undo_\w+)", pawl.succeed("inbox", "--list"))
        assert found is not None
        pawl.succeed("approve", *found.groups(), "--yes")
        output = undoing.result()
    assert "create_task (Delete the task 'Paint the fence') undone" in output.splitlines()[-1]
    output = pawl.succeed("undo", pawl.done("what is 17 * 23"), "--yes")
    assert "calculate nothing to undo: It was read-only." in output
    assert output.splitlines()[-1] == "There is nothing to undo."


def test_cancelled_detached_run_exits_with_1(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "count very slowly to 500").strip()
    assert "cancel" in pawl.succeed("cancel", run_id, "--reason", "enough")
    code, output, _ = pawl.run("watch", run_id)
    assert (code, "cancelled" in output.splitlines()[-1]) == (1, True)


def test_run_waits_for_tokens_and_continues_after_top_up(pawl: CommandLine) -> None:
    """LOOP-12: the inbox shows the minimum number of tokens that the run needs."""
    run_id = pawl.succeed("run", "--detach", "--tokens-max", "5", "what is 17 * 23").strip()
    pawl.until(lambda runs: "waiting for more tokens" in line_of(run_id, runs), "runs")
    needed = re.search(rf"add at least (\d+) tokens with: pawl top-up {run_id} \1", pawl.succeed("inbox"))
    assert needed
    assert f"at least {needed[1]} tokens" in pawl.succeed("status", run_id)
    assert "of 50005 tokens" in pawl.succeed("top-up", run_id, "50000")
    output = pawl.succeed("watch", run_id)
    for line in ("‖ waiting for more tokens", f"pawl top-up {run_id} {needed[1]}", "+ me added 50000 tokens"):
        assert line in output
    assert "completed" in output.splitlines()[-1]
    assert "ended" in pawl.refuse("top-up", run_id, "1")


def test_whoami_shows_the_caller_and_available_options(pawl: CommandLine) -> None:
    """OPS-1: the output shows the caller's store, credential and permissions, and the tools, agents and limits."""
    output = pawl.succeed("whoami", "--limits")
    for said in (
        "me of the store local",
        "credential id: local",
        "decision right: store",
    ):
        assert said in output
    assert re.search(r"^tool count: \d+$", output, re.MULTILINE)
    assert re.search(r"^agent names: .*\bdefault\b", output, re.MULTILINE)
    assert "limits:\n  rounds max: 10\n" in output
    reported = json.loads(pawl.user("ann").succeed("whoami", "--json"))
    assert (reported["caller"]["user_id"], reported["caller"]["store_id"]) == ("ann", "local")
    assert re.search(r"^send_email\t1\tbackend\tsensitive\tat most once\t", pawl.succeed("tools"), re.MULTILINE)


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
    assert "+delegates_to:" in pawl.succeed("apply", "-f", str(files), "--dry-run")
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
    pawl.until(lambda _: "PAWL_APPLY: greeter: version 1" in screen.read_text(), "agents", "list")
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
