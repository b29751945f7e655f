"""Implements commands that run a service's program or open the console. They use more than the public API."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console

from pawl.chassis.identity.local_key import LOCAL_KEY
from pawl.chassis.rpc.replicas import read_endpoints
from pawl.cli import access, toolbox
from pawl.cli.command import Flags, command, say
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient
from pawl.server.identity import browser_seal
from pawl.server.identity.browser_seal import CODE_SECONDS, SEAL_FILE, Code

_DATABASE: Final = "PAWL_DATABASE_URL"
_ALL_PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

tools = typer.Typer(invoke_without_command=True)
tools.callback()(toolbox.tools)
model = typer.Typer(help="Check model servers.", no_args_is_help=True)
model.callback()(lambda: None)
keys = access.keys


@tools.command(add_help_option=False, context_settings=_ALL_PASSED_ON)
def check(context: typer.Context) -> None:
    """Check Python tools without a suite or a model. See `pawl tools check --help`."""
    flags: Flags = context.obj
    given = (*(("--store", store) for store in flags["store"] or ()), ("--user", flags["user"]))
    run_program(
        "pawl.tool_registry.check",
        [*context.args, *(each for flag, value in given if value is not None for each in (flag, value))],
    )


@model.command("check", add_help_option=False, context_settings=_ALL_PASSED_ON)
def check_model(context: typer.Context) -> None:
    """Probe a model server and print settings for it. See `pawl model check --help`.

    Uses the key in OPENAI_API_KEY, and makes six to nine short model calls.
    """
    run_program("pawl.agent_loop.check", context.args)


tools.command("stats")(toolbox.stats)


def run_program(program: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run([sys.executable, "-m", program, *arguments], check=False, env=environment)
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


@keys.command()
def bootstrap(
    context: typer.Context,
    *,
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", help="Default: PAWL_DATABASE_URL, or the data folder's database."),
    ] = None,
) -> None:
    """Create the deployment's first key.

    Requires access to the database. Prints only the secret to standard output. If the deployment already has a key, no
    key is created.
    """
    flags: Flags = context.obj
    if database_url is not None:
        variables = {_DATABASE: database_url, f"{_DATABASE}_FILE": ""}
    elif os.environ.get(_DATABASE) or os.environ.get(f"{_DATABASE}_FILE"):
        variables = {}
    else:
        variables = {f"{_DATABASE}_FILE": str((flags["data"] or Path(".pawl")) / "secrets" / "database.url")}
    run_program("pawl.job_store.bootstrap", environment={**os.environ, **variables})


@command()
async def console(
    target: AsyncClient,
    console: Console,
    *,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link instead of opening it.")] = False,
) -> None:
    """Open the console in your browser, logged in. The link works only once, within two minutes, on this machine."""
    found = read_endpoints(target.data)
    gateways = [replica.http for replica in (found.services.get("gateway", []) if found else []) if replica.ready]
    if found is None or not gateways:
        raise CommandError(
            "No gateway is running for this folder. Start the suite with `pawl up`. For a remote suite, open its"
            " gateway in a browser and log in with your key."
        )
    address = f"{'https' if found.authority else 'http'}://{gateways[0]}/"
    key, seal = (_secret(Path(found.secrets) / name) for name in (LOCAL_KEY, SEAL_FILE))
    code = Code(key=key, gateway=gateways[0], end_time=time.time() + CODE_SECONDS, nonce=secrets.token_urlsafe(16))
    link = f"{address}#code={browser_seal.close(seal, code)}" if key and seal else address
    is_open = not no_open and webbrowser.open(link)
    say(console, f"The console is open in your browser: {address}" if is_open else link)


def _secret(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
