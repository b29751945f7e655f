"""`pawl rules`: decided once, for the next time (HITL-5)."""

from __future__ import annotations

import re

import pytest

from tests.system.cli.conftest import CommandLine

LETTER = "e-mail zoe@example.com about lunch: see you at noon"


def test_a_rule_lets_calls_pass_until_it_is_revoked_and_each_names_it(pawl: CommandLine) -> None:
    made = pawl.succeed("rules", "allow", "send_email", "--like", "to=zoe@*", "--for", "1h", "--reason", "a test")
    rule_id = re.findall(r"rule_\w+", made)[0]
    assert f"allowed by {rule_id}" in pawl.succeed("run", LETTER)
    assert re.search(rf"{rule_id}\s+allow\s+send_email where to like zoe@\*", pawl.succeed("rules", "list"))
    denied = pawl.succeed("rules", "deny", "send_email", "--equals", 'subject="lunch"')
    deny_id = re.findall(r"rule_\w+", denied)[0]
    assert f"denies this call ({deny_id})" in pawl.succeed("run", LETTER)
    pawl.succeed("rules", "revoke", deny_id)
    pawl.succeed("rules", "revoke", rule_id)
    run_id = pawl.succeed("run", "--detach", LETTER).strip()
    pawl.until(lambda inbox: run_id in inbox, "inbox", "--list")
    pawl.succeed("cancel", run_id)
    assert rule_id not in pawl.succeed("rules", "list")
    assert rule_id in pawl.succeed("rules", "list", "--all")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("allow", "*"), "must end within 30 days"),
        (("allow", "nothing_of_the_kind"), "TOOL_NOT_FOUND|tool"),
        (("allow", "send_email", "--for", "soon"), "no duration like"),
        (("deny", "send_email", "--like", "to"), "argument=value"),
        (("deny", "send_email", "--conversation", "conv_x"), "No such conversation"),
        (("revoke", "rule_x"), "rule"),
    ],
)
def test_what_cannot_be_a_rule_is_said_in_a_sentence(pawl: CommandLine, arguments: tuple[str, ...], says: str) -> None:
    code, _, errors = pawl.run("rules", *arguments)
    assert code == 2
    assert re.search(says, errors)
