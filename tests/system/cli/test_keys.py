"""`pawl keys`, `pawl sources` and `pawl demo` (OPS-1, TOOL-3).

tests/system/access tries the keys against every service.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.system.cli.conftest import CommandLine


def test_invalid_key_options_are_refused_with_a_clear_error(pawl: CommandLine) -> None:
    for arguments, says in (
        ("create ann --role delegate", "roles that you do not have"),
        ("create ann --role member --store acme --store globex", "Specify --store only once."),
        ("create ann --role member --for soon", "not a duration like"),
        ("revoke key_x", "`pawl keys list`"),
        ("bootstrap --database-url postgresql://127.0.0.1:1/nothing", "no database answered"),
    ):
        assert says in pawl.refuse("keys", *arguments.split()), arguments


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
