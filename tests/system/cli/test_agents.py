"""`pawl agents` and `pawl apply`: agents from files, runs that keep their version, tasks for other agents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cli.conftest import CommandLine
from tests.system.cli.test_commands import pending_call, started

CLERK = """
name: clerk
options: {instructions: You are the clerk.}
tools: {names: [send_email], patterns: ["get_current_*", "gone_*"]}
delegates_to: [counter]
card: {title: Clerk}
---
name: counter
options: {instructions: You work out sums.}
tools: {names: [calculate]}
"""
MAIL = "e-mail ann@example.com about lunch: see you at noon"


@pytest.fixture
def files(pawl: CommandLine, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "all.yaml").write_text(CLERK)
    yield tmp_path
    for name in ("clerk", "counter"):
        pawl.run("agents", "delete", name, "--yes")


def only(pattern: str, text: str) -> str:
    (found,) = set(re.findall(pattern, text))
    return str(found)


def test_agents_of_a_folder_are_saved_once(pawl: CommandLine, files: Path) -> None:
    dry = pawl.succeed("apply", "-f", str(files), "--dry-run")
    assert "+delegates_to:" in dry
    assert "+# tool: run_agent" in dry, "as when it is saved"
    assert "clerk " not in pawl.succeed("agents", "list")
    saved = pawl.succeed("apply", "-f", str(files))
    assert saved.index("counter: version") < saved.index("clerk: version"), "those first to which others delegate"
    assert "warning: gone_* matches no tool now" in saved
    assert "+# tool: get_current_time" in saved
    assert pawl.succeed("apply", "-f", str(files)).count("unchanged") == 2
    (files / "all.yaml").write_text(CLERK.replace("the clerk", "a clerk"))
    changed = pawl.succeed("apply", "-f", str(files))
    assert re.search(r"-  instructions: You are the clerk.\n *\+  instructions: You are a clerk.", changed)
    shown = pawl.succeed("agents", "show", "clerk")
    assert "You are a clerk." in shown
    assert "round_limit_policy" not in shown, "what nobody said is not there"
    code, _, errors = pawl.run("agents", "show", "clerk", "--version", "900")
    assert code == 2
    assert "`pawl agents versions clerk` lists those that there are" in errors
    (files / "again").mkdir()
    (files / "again" / "clerk.yaml").write_text(shown)
    assert "clerk: unchanged" in pawl.succeed("apply", "-f", str(files / "again")), "what is shown can be applied"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("name: [", "is no YAML"),
        ("- clerk", "is no agent"),
        ("name: clerk\noptions: {instruction: typo}", 'no field named "instruction"'),
        ("name: a\ndelegates_to: [b]\n---\nname: b\ndelegates_to: [a]", "in a circle"),
        ("name: a\n---\nname: a", "two agents 'a'"),
        ("name: a b", "must have 1 to 64 letters"),
        ("name: a\ntools: {names: [fly]}", "There is no tool 'fly'"),
        ("name: a\ndelegates_to: [nobody]", "there is no agent 'nobody'"),
    ],
)
def test_files_that_cannot_be_meant_are_said_in_a_sentence(
    pawl: CommandLine, tmp_path: Path, content: str, told: str
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    code, output, errors = pawl.run("apply", "-f", str(tmp_path))
    assert (code, output) == (2, "")
    assert told in errors


def test_a_run_goes_on_with_its_version_while_its_agent_is_changed_and_deleted(pawl: CommandLine, files: Path) -> None:
    pawl.succeed("apply", "-f", str(files))
    run_id = started(pawl, MAIL, "--agent", "clerk")
    call_id = pending_call(pawl, run_id)
    (files / "all.yaml").write_text("name: clerk\ntools: {names: [get_current_time]}\n")
    assert "-# tool: send_email" in pawl.succeed("apply", "-f", str(files))
    code, output, _ = pawl.run("run", "--agent", "clerk", MAIL)
    assert "[send_email]" not in output, "the newest version has not the tool"
    pawl.succeed("agents", "delete", "clerk", "--yes")
    code, _, errors = pawl.run("run", "--agent", "clerk", MAIL)
    assert code == 2
    assert "`pawl agents list`" in errors
    pawl.succeed("approve", run_id, call_id, "--yes")
    output = pawl.succeed("watch", run_id, "--json")
    assert '"name": "clerk"' in output
    assert "RUN_STATE_COMPLETED" in output


def test_an_agent_gives_a_task_to_another_one_that_has_tools_of_its_own(pawl: CommandLine, files: Path) -> None:
    pawl.succeed("apply", "-f", str(files))
    output = pawl.succeed(
        "run", "--agent", "clerk", 'call run_agent with {"task": "what is 6 * 7?", "agent": "counter"}'
    )
    assert "42" in output
    child = only(r"run_[0-9a-f]{32}", pawl.succeed("runs", "--agent", "counter"))
    events = pawl.succeed("watch", child, "--json")
    assert '"name": "counter"' in events
    assert "calculate" in events
    refused = pawl.succeed(
        "run", "--agent", "clerk", 'call run_agent with {"task": "what is 6 * 7?", "agent": "clerk"}'
    )
    assert "You may name: counter" in refused


def test_agents_of_the_folder_that_the_suite_was_started_with_are_there(pawl: CommandLine) -> None:
    pawl.until(lambda agents: "greeter" in agents, "agents", "list")
    screen = pawl.data.parent / "screen"
    pawl.until(lambda _: "PAWL_AGENTS: greeter: version 1" in screen.read_text(), "agents", "list")
    assert "Greet people." in pawl.succeed("agents", "show", "greeter")


def test_the_default_tells_a_model_how_to_work_with_pawl_until_the_store_replaces_it(
    pawl: CommandLine, tmp_path: Path
) -> None:
    assert "When to ask" in pawl.succeed("agents", "show", "default")
    (tmp_path / "default.yaml").write_text("name: default\noptions: {instructions: Be brief.}\n")
    try:
        pawl.succeed("apply", "-f", str(tmp_path / "default.yaml"))
        run_id = pawl.succeed("run", "--detach", "what is 17 * 23").strip()
        assert '"name": "default"' in pawl.succeed("watch", run_id, "--json")
    finally:
        pawl.succeed("agents", "delete", "default", "--yes")
    assert "When to ask" in pawl.succeed("agents", "show", "default")


def test_a_draft_is_tried_shown_and_published(pawl: CommandLine, files: Path) -> None:
    file = files / "draft.yaml"
    file.write_text("name: clerk\ntools: {names: [calculate]}\n")
    saved = pawl.succeed("apply", "-f", str(file), "--draft")
    assert "draft/clerk: version 1" in saved
    assert "draft/clerk: unchanged" in pawl.succeed("apply", "-f", str(file), "--draft")
    listed = pawl.succeed("agents", "list")
    assert "draft/clerk" in listed
    assert not re.search(r"^ *clerk", listed, re.MULTILINE)
    assert "391" in pawl.succeed("run", "--agent", "draft/clerk", "what is 17 * 23")
    file.write_text(pawl.succeed("agents", "show", "draft/clerk"))
    assert "\nclerk: version" in "\n" + pawl.succeed("apply", "-f", str(file))
    pawl.succeed("agents", "delete", "draft/clerk", "--yes")
    code, _, errors = pawl.run("run", "--agent", "draft/clerk", "what is 17 * 23")
    assert code == 2
    assert "`pawl agents list`" in errors
    assert "calculate" in pawl.succeed("agents", "show", "clerk"), "the agent of the store is another one"


def test_an_agent_keeps_to_its_rules_and_is_told_apart_in_lists_and_figures(pawl: CommandLine, files: Path) -> None:
    """HITL-5, TOOL-6."""
    pawl.succeed("apply", "-f", str(files))
    pawl.succeed("rules", "deny", "send_email", "--agent", "clerk", "--reason", "a test")
    (rule_id,) = re.findall(r"(rule_\w+).*for runs of the agent clerk", pawl.succeed("rules", "list"))
    labels = ("--label", "case=rules", "--label", "env=test")
    run_id = pawl.succeed("run", "--detach", "--agent", "clerk", *labels, MAIL).strip()
    assert f"a rule of the agent clerk denies this call ({rule_id})" in pawl.succeed("watch", run_id)
    assert run_id in pawl.succeed("runs", "--agent", "clerk", *labels)
    assert "no such runs" in pawl.succeed("runs", "--agent", "counter", "--label", "case=rules")
    assert re.search(r"clerk\tsend_email\t\d+\t", pawl.succeed("tools", "stats", "send_email", "--by-agent"))
    assert "proposed" in pawl.succeed("audit", "list", "--agent", "clerk", "--run", run_id)
    waiting = started(pawl, MAIL, "--label", "case=rules")
    assert pending_call(pawl, waiting)
    assert waiting in pawl.succeed("runs", "--wait", "approval", "--label", "case=rules")
    assert run_id not in pawl.succeed("runs", "--wait", "approval", "--label", "case=rules")
    pawl.succeed("cancel", waiting)
    pawl.succeed("rules", "revoke", rule_id)
    code, _, said = pawl.run("rules", "deny", "send_email", "--agent", "nobody")
    assert code
    assert "pawl agents list" in said
