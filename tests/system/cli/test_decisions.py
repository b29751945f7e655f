"""Decisions on the command line: calls are shown, edited, rejected, allowed by rules, and audited."""

from __future__ import annotations

import json

from tests.system.cli.conftest import CommandLine

LETTER = "e-mail ann@example.com about lunch: see you at noon"
EDITED = '{"to": ["bob@example.com"], "subject": "dinner", "body": "at eight", "cc": []}'


def story(pawl: CommandLine, run_id: str) -> list[tuple[str, str, str]]:
    lines = pawl.succeed("audit", "list", "--run", run_id, "--json").splitlines()
    return [
        (entry["kind"].removeprefix("AUDIT_KIND_").lower(), entry["verdict"], entry.get("by_user_id", ""))
        for entry in map(json.loads, lines)
    ]


def figures(pawl: CommandLine) -> list[int]:
    rows = [line.split("\t") for line in pawl.succeed("tools", "stats").splitlines()]
    return next(([int(row[2]), *map(int, row[8:])] for row in rows if row[0] == "send_email"), [0] * 5)


def test_gated_calls_are_shown_decided_on_once_audited_and_counted(pawl: CommandLine) -> None:
    """HITL-2, HITL-3, TOOL-6: without a terminal to confirm, nothing is approved."""
    before = figures(pawl)
    ran = [("executed", "APPROVED", ""), ("returned", "SUCCEEDED", "")]
    # Edited arguments are checked again when they are sent.
    asked = ("proposed", "APPROVE", "")
    for decision, shown, audited in (
        ((), "completed", [asked, ("decided", "APPROVE", "me"), *ran]),
        (("--edit", EDITED), "bob@example.com", [asked, asked, ("decided", "EDIT", "me"), *ran]),
        (("--reject", "not before noon"), "not before noon", [asked, ("decided", "REJECT", "me")]),
    ):
        run_id = pawl.started(LETTER)
        call_id = pawl.pending(run_id)
        code, _, errors = pawl.run("approve", run_id, call_id, keyboard="y\n")
        assert (code, errors.strip()) == (2, "There is no terminal to ask for confirmation. Add --yes to confirm.")
        assert "see you at noon" in pawl.succeed("approve", run_id, call_id, "--yes", *decision)
        assert shown in pawl.succeed("watch", run_id)
        assert "is not pending" in pawl.refuse("approve", run_id, call_id)
        assert story(pawl, run_id) == audited
    assert [now - then for now, then in zip(figures(pawl), before, strict=True)] == [2, 3, 1, 1, 1]


def test_chat_runs_front_end_tool_and_accepts_answers_and_decisions(pawl: CommandLine) -> None:
    keyboard = (
        "show me the plan\n"
        "book a table\n2\n"
        "e-mail ann@example.com about lunch: hi\nperhaps\nr: not today\n"
        "/runs\nwhat is 6 * 7\n"
    )
    output = pawl.succeed("chat", keyboard=keyboard)
    for said in ("[the plan]", 'You answered "Tomorrow at 19:00"', "Type one of", "send_email rejected", "6 * 7 = 42"):
        assert said in output
    assert output.count("completed (") == 4
