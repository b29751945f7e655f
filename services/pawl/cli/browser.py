"""`pawl console`: the console in the browser, logged in."""

from __future__ import annotations

import secrets
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pawl.chassis import browser_seal
from pawl.chassis.browser_seal import CODE_SECONDS, SEAL_FILE, Code
from pawl.chassis.endpoints import read_endpoints
from pawl.chassis.local_key import LOCAL_KEY
from pawl.cli.command import command
from pawl.cli.failure import CommandError
from pawl.client import AsyncClient


@command()
async def console(
    target: AsyncClient,
    console: Console,
    *,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the link instead of opening it.")] = False,
) -> None:
    """Open the console in your browser, logged in. The link works once, for two minutes, on this machine."""
    found = read_endpoints(target.data)
    gateways = [replica.http for replica in (found.services.get("gateway", []) if found else []) if replica.ready]
    if found is None or not gateways:
        raise CommandError(
            "No gateway of this folder runs. Start the suite with `pawl up`; of a suite elsewhere, open the address of"
            " its gateway and log in with your key."
        )
    scheme = "https" if found.authority else "http"
    key = _secret(Path(found.secrets) / LOCAL_KEY)
    seal = _secret(Path(found.secrets) / SEAL_FILE)
    link = f"{scheme}://{gateways[0]}/"
    if key and seal:
        code = Code(key=key, gateway=gateways[0], end_time=time.time() + CODE_SECONDS, nonce=secrets.token_urlsafe(16))
        link += f"#code={browser_seal.close(seal, code)}"
    if not no_open and webbrowser.open(link):
        console.print(f"The console is open in your browser: {scheme}://{gateways[0]}/", markup=False)
        return
    console.print(link, markup=False, soft_wrap=True)


def _secret(path: Path) -> str:
    """Return a secret of the suite's folder; empty if it has none, or it is not ours to read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
