"""`pawl sources` against a real suite, from adding a server to a model that calls its tool (TOOL-3)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.mcp_program import flags
from tests.system.cli.conftest import CommandLine


def describe(folder: Path, description: str) -> None:
    tool = {"name": "echo", "description": description, "inputSchema": {"type": "object"}}
    (folder / "tools.json").write_text(json.dumps([tool]))


def test_source_is_added_used_persisted_checked_approved_and_removed(pawl: CommandLine, tmp_path: Path) -> None:
    describe(tmp_path, "Says it again.")
    added = pawl.succeed("sources", "add-mcp", "parrot", "--policy", "*=sensitive,read_only", *flags(tmp_path))
    assert added == "parrot.echo version 1: sensitive, read only. Says it again.\n"
    assert "parrot\tready\t1" in pawl.succeed("sources", "list")
    # The model sees a name without a dot; a rule uses the registered name.
    run_id = pawl.started('call parrot__echo with {"word": "polly"}')
    pawl.succeed("approve", run_id, pawl.pending(run_id), "--yes", "--remember", "run")
    assert f"parrot.echo\tin {run_id}" in pawl.succeed("rules", "list")
    output = pawl.succeed("watch", run_id)
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
    assert "Removed" in pawl.succeed("sources", "remove", "parrot")
    assert pawl.succeed("sources", "list") == ""


def test_invalid_sources_are_refused_with_a_clear_error(pawl: CommandLine) -> None:
    for arguments, reported in (
        ("add-http x --openapi https://a.example/ --method GET", "--method cannot be combined with --openapi"),
        ("add-http x --endpoint https://a.example/ --arguments @/no/such/file", "cannot be read"),
        ("add-http x --endpoint http://127.0.0.1:9/ --method GET --description d", "port 9 of 127.0.0.1"),
        ("add-http x --openapi http://169.254.169.254/", "not an allowed address"),
        ("add-http x --openapi http://127.0.0.1:9/", "port 9 of 127.0.0.1"),
        ("add-mcp x --url http://127.0.0.1:9/mcp", "egress to port 9 of 127.0.0.1 is not allowed"),
        ("add-mcp x --url http://127.0.0.1:9/ --env A=b", "--env cannot be combined with --url"),
        ("add-mcp x --header A=b -- true", "--header cannot be combined with command"),
        ("add-mcp x -- /no/such/program", "No such file"),
        ("check absent", "pawl sources list"),
    ):
        assert reported in pawl.refuse("sources", *arguments.split()), arguments
