"""Approving for the next time too, against a real suite (HITL-5)."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.fakes.mcp_program import flags
from tests.system.cli.conftest import CommandLine
from tests.system.cli.test_commands import pending_call, started
from tests.system.cli.test_sources import describe

LETTER = "e-mail ann@example.com about lunch: see you at noon"


class As(CommandLine):
    """The command line of one user, whose rules are in nobody's way."""

    def __init__(self, pawl: CommandLine, user: str) -> None:
        super().__init__(pawl.data)
        self._user = user

    def run(self, *arguments: str, keyboard: str = "") -> tuple[int, str, str]:
        return super().run("--user", self._user, *arguments, keyboard=keyboard)


def rules(pawl: CommandLine) -> list[list[str]]:
    """The rules in force, a list of columns each."""
    lines = pawl.succeed("rules", "list").splitlines()
    return [line.split("\t") for line in lines if line.startswith("rule_")]


def test_an_approval_is_remembered_for_so_many_calls_and_so_long(pawl: CommandLine) -> None:
    amy = As(pawl, "amy")
    run_id = started(amy, LETTER)
    call_id = pending_call(amy, run_id)
    told = amy.succeed("approve", run_id, call_id, "--yes", "--remember", "user", "--for", "1h", "--uses", "1")
    assert "Approved. From now on: allow send_email, for your runs." in told
    ((rule_id, effect, tool, where, used, until, by),) = rules(amy)
    assert (effect, tool, where, used, by) == ("allow", "send_email", "for your runs", "0/1", "amy")
    assert until != "it is revoked"
    assert f"pawl rules revoke {rule_id}" in told
    assert "completed" in amy.succeed("watch", run_id)
    assert "completed" in amy.succeed("run", LETTER), "nobody is asked"
    assert started(amy, LETTER), "it was good for one call"
    assert rules(amy) == []


def test_a_tool_of_a_source_is_remembered_in_its_run(pawl: CommandLine, tmp_path: Path) -> None:
    """By the name that the register has, which is not the model's."""
    bea = As(pawl, "bea")
    describe(tmp_path, "Says it again.")
    bea.succeed("sources", "add-mcp", "jay", *flags(tmp_path))
    run_id = started(bea, 'call jay__echo with {"word": "polly"}')
    bea.succeed("approve", run_id, pending_call(bea, run_id), "--yes", "--remember", "run")
    ((_, _, tool, where, *_),) = rules(bea)
    assert (tool, where) == ("jay.echo", f"in {run_id}")
    assert "polly" in bea.succeed("watch", run_id)
    bea.succeed("sources", "remove", "jay")


def test_what_cannot_be_remembered_leaves_the_call_as_it_is(pawl: CommandLine) -> None:
    cid = As(pawl, "cid")
    run_id = started(cid, LETTER)
    call_id = pending_call(cid, run_id)
    for options, told in (
        (("--remember", "user", "--for", "soon"), "is no duration"),
        (("--remember", "user", "--reject", "no"), "--remember goes with an approval"),
        (("--remember", "user", "--edit", "{}"), "--remember goes with an approval"),
        (("--uses", "2"), "go with --remember"),
        (("--remember", "store"), "store"),
    ):
        code, _, errors = cid.run("approve", run_id, call_id, "--yes", *options)
        assert code == 2
        assert told in errors
    assert rules(cid) == []
    assert call_id in cid.succeed("inbox", "--list")


def test_a_question_and_the_run_of_somebody_else_cannot_be_remembered(pawl: CommandLine) -> None:
    dan, eve = As(pawl, "dan"), As(pawl, "eve")
    run_id = started(dan, "book a table")
    code, _, errors = dan.run("approve", run_id, pending_call(dan, run_id), "--yes", "--remember", "user")
    assert (code, "answer it with --answer" in errors) == (2, True)
    dan.succeed("cancel", run_id)
    run_id = started(dan, LETTER)
    call_id = pending_call(dan, run_id)
    code, _, errors = eve.run("approve", run_id, call_id, "--yes", "--remember", "user")
    assert (code, "this run is somebody else's" in errors) == (2, True)
    assert rules(eve) == []
    eve.succeed("approve", run_id, call_id, "--yes")


def test_always_in_the_inbox_is_for_the_conversation(pawl: CommandLine) -> None:
    fay = As(pawl, "fay")
    run_id = started(fay, LETTER)
    conversation = fay.succeed("runs").split("\t")[3]
    screen, keyboard = pty.openpty()
    try:
        os.write(screen, b"always\n")
        command = [sys.executable, "-m", "pawl.cli", "--user", "fay", "inbox"]
        done = subprocess.run(
            command, env=fay.environment(), stdin=keyboard, capture_output=True, text=True, timeout=240, check=False
        )
    finally:
        os.close(screen)
        os.close(keyboard)
    assert done.returncode == 0, done.stderr
    assert "always to allow the tool in its conversation" in done.stdout
    assert f"From now on: allow send_email, in {conversation}." in done.stdout
    assert "completed" in fay.succeed("watch", run_id)
    assert "completed" in fay.succeed("run", "--conversation", conversation, LETTER), "nobody is asked"
    assert started(fay, LETTER), "another conversation is asked"
