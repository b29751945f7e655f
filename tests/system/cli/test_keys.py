"""`pawl keys`: create, list, use and revoke keys (OPS-1). tests/system/access tries them against every service."""

from __future__ import annotations

from pawl.chassis.identity.key_rows import is_secret
from tests import commands
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
