"""`pawl sources` against a real suite: from adding a server to a model that calls its tool (TOOL-3)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.system.cli.conftest import CommandLine

# The first test waits for the suite to start.
pytestmark = pytest.mark.timeout(120)

FAKE = Path(__file__).parents[2] / "fakes" / "mcp_server.py"


def describe(folder: Path, description: str) -> None:
    tool = {"name": "echo", "description": description, "inputSchema": {"type": "object"}}
    (folder / "tools.json").write_text(json.dumps([tool]))


def test_a_source_is_added_used_checked_approved_and_removed(pawl: CommandLine, tmp_path: Path) -> None:
    describe(tmp_path, "Says it again.")
    server = ("--", sys.executable, "-I", str(FAKE), str(tmp_path))
    added = pawl.succeed("sources", "add-mcp", "parrot", "--policy", "*=safe,read_only", *server)
    assert added.split("\t")[:4] == ["parrot.echo", "1", "safe", "read_only"]
    assert "parrot\tready\t1" in pawl.succeed("sources", "list")
    # The model knows the tool by a name without a dot.
    output = pawl.succeed("run", 'call parrot__echo with {"word": "polly"}')
    assert "parrot.echo" in output
    assert "polly" in output

    describe(tmp_path, "Tells it to others.")
    code, output, _ = pawl.run("sources", "check", "parrot")
    assert code == 1
    assert "Says it again." in output
    assert "Tells it to others." in output
    shown = output.splitlines()[-1].split()[-1]
    assert "Tells it to others." in pawl.succeed("sources", "approve", "parrot", shown)
    assert "parrot is ready" in pawl.succeed("sources", "check", "parrot")
    assert "gone" in pawl.succeed("sources", "remove", "parrot")
    assert pawl.succeed("sources", "list") == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("add-mcp", "x"), "Give either a program"),
        (("add-mcp", "x", "--url", "http://127.0.0.1:9/", "--env", "A=b"), "are for programs"),
        (("add-mcp", "x", "--header", "A=b", "--", "true"), "go with --url"),
        (("add-mcp", "x", "--policy", "a=nice", "--", "true"), "'nice' is none of"),
        (("add-mcp", "x", "--env", "A", "--", "true"), "NAME=value"),
        (("add-mcp", "x", "--", "/no/such/program"), "No such file"),
        (("add-http", "x", "--openapi", "/no/such/file"), "cannot be read"),
        (("check", "absent"), "pawl sources list"),
        (("remove", "absent"), "pawl sources list"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(pawl: CommandLine, arguments: tuple[str, ...], told: str) -> None:
    code, _, errors = pawl.run("sources", *arguments)
    assert code == 2
    assert told in errors
