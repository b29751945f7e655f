"""`pawl keys`, `pawl sources` and `pawl demo` (OPS-1, TOOL-3).

tests/system/access tries the keys against every service.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pawl.server.identity.key_rows import is_secret
from tests import commands
from tests.fakes.mcp_program import flags
from tests.system.cli.conftest import CommandLine


def test_key_is_created_used_listed_without_secret_and_revoked(pawl: CommandLine) -> None:
    code, output, errors = pawl.run("keys", "create", "ann", "--role", "viewer", "--name", "laptop", "--for", "1h")
    key_id, secret = errors.split()[1].rstrip("."), output.strip()
    assert (code, is_secret(secret)) == (0, True)
    listed = pawl.succeed("keys", "list")
    (line,) = (line for line in listed.splitlines() if key_id in line)
    assert "ann\tviewer\t" in line
    assert line.endswith("\tme\tlaptop")
    assert secret not in listed
    done = commands.pawl("run", "--detach", "hello", environment=pawl.environment() | {"PAWL_API_KEY": secret})
    assert (done.code, "requires one of the roles" in done.errors) == (2, True)
    pawl.succeed("keys", "revoke", key_id)
    assert key_id not in pawl.succeed("keys", "list")
    assert key_id in pawl.succeed("keys", "list", "--all")
    assert "key revoked" in pawl.succeed("keys", "events", "--key", key_id)


def test_bootstrap_key_is_created_once_and_can_create_others(pawl: CommandLine) -> None:
    code, secret, errors = pawl.run("keys", "bootstrap")
    assert code == 0, errors
    deployment = pawl.environment() | {"PAWL_API_KEY": secret.strip()}
    assert "The deployment already has a key" in pawl.refuse("keys", "bootstrap")
    arguments = ("create", "backend", "--in-store", "acme", "--role", "delegate", "--role", "member")
    created = commands.pawl("keys", *arguments, environment=deployment)
    assert created.code == 0, created.errors
    listed = commands.pawl("keys", "list", "--in-store", "acme", environment=deployment).output
    assert "backend\tdelegate, member" in listed
    bootstrap_id = commands.pawl("keys", "list", environment=deployment).output.split("\t")[0]
    assert commands.pawl("keys", "revoke", bootstrap_id, environment=deployment).code == 0


def test_invalid_key_options_are_refused_with_a_clear_error(pawl: CommandLine) -> None:
    for arguments, says in (
        ("create ann --role delegate", "roles that you do not have"),
        ("create ann --role member --in-store acme", "A store's keys can be managed only by its operators"),
        ("create ann --role member --for soon", "not a duration like"),
        ("revoke key_x", "`pawl keys list`"),
        ("bootstrap --database-url postgresql://127.0.0.1:1/nothing", "no database answered"),
    ):
        assert says in pawl.refuse("keys", *arguments.split()), arguments


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


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.timeout(900)
def test_demo_runs_and_finds_all_steps_in_the_ledger() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pawl.cli", "demo"], capture_output=True, text=True, timeout=600, check=False
    )
    # A busy machine may need longer than a minute.
    is_late = "checks failed: finished in time\n" in done.stdout
    assert is_late or "All checks passed." in done.stdout, done.stdout + done.stderr
    assert done.returncode == is_late
    assert done.stderr == ""
