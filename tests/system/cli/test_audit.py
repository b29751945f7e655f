"""TOOL-6 from the command line, on a whole suite: what was decided about calls is in the audit chain."""

from __future__ import annotations

import json

from tests.system.cli.conftest import CommandLine
from tests.system.cli.test_commands import pending_call, started

EDITED = '{"to": ["bob@example.com"], "subject": "dinner", "body": "at eight", "cc": []}'


def story(pawl: CommandLine, run_id: str) -> list[tuple[str, str, str]]:
    lines = pawl.succeed("audit", "list", "--run", run_id, "--json").splitlines()
    return [(entry["kind"], entry["verdict"], entry["by_user_id"]) for entry in map(json.loads, lines)]


def decided(pawl: CommandLine, *decision: str) -> str:
    run_id = started(pawl, "e-mail ann@example.com about lunch: see you at noon")
    pawl.succeed("approve", run_id, pending_call(pawl, run_id), "--yes", *decision)
    pawl.succeed("watch", run_id)
    return run_id


def figures(pawl: CommandLine) -> dict[str, list[int]]:
    """Executions, and approvals asked, granted, edited, refused, by tool."""
    rows = [line.split("\t") for line in pawl.succeed("tools", "stats").splitlines() if "\t" in line]
    return {row[0]: [int(row[1]), *map(int, row[7:])] for row in rows}


def test_decisions_are_audited_and_counted(pawl: CommandLine) -> None:
    before = figures(pawl).get("send_email", [0] * 5)
    approved, edited, rejected = decided(pawl), decided(pawl, "--edit", EDITED), decided(pawl, "--reject", "no")
    ran = [("executed", "APPROVED", ""), ("returned", "SUCCEEDED", "")]
    assert story(pawl, approved) == [("proposed", "APPROVE", ""), ("decided", "APPROVE", "me"), *ran]
    # The edited arguments are checked again when they are sent.
    asked = ("proposed", "APPROVE", "")
    assert story(pawl, edited) == [asked, asked, ("decided", "EDIT", "me"), *ran]
    assert story(pawl, rejected) == [asked, ("decided", "REJECT", "me")]
    after = figures(pawl)["send_email"]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 3, 1, 1, 1]


def test_the_chain_is_verified_with_the_head_that_was_kept(pawl: CommandLine) -> None:
    pawl.succeed("run", "what is 1 + 1")
    line = pawl.succeed("audit", "verify").splitlines()[-1]
    assert line.startswith("head ")
    pawl.succeed("run", "what is 1 + 1")
    assert "is whole" in pawl.succeed("audit", "verify", "--known-head", line)
    seq = line.removeprefix("head ").partition(":")[0]
    code, output, _ = pawl.run("audit", "verify", "--known-head", f"{seq}:{'0' * 64}")
    assert code == 1
    assert output.startswith("HEAD_MISMATCH")
    assert pawl.run("audit", "verify", "--known-head", "x")[0] == 2
