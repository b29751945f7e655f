"""`pawl tools check`."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import typer

from services.cli.command import Flags

_PROGRAM: Final = "services.tool_registry.check"


def check(context: typer.Context) -> None:
    """Look at Python tools, without a suite and without a model; `pawl tools check --help` says more.

    A program of the registry does it, because the command line itself knows
    nothing but the public API. It gets everything that stands behind `check`.
    """
    flags: Flags = context.obj
    arguments = list(context.args)
    if flags.store is not None:
        arguments += ["--store", flags.store]
    if flags.user is not None:
        arguments += ["--user", flags.user]
    done = subprocess.run([sys.executable, "-m", _PROGRAM, *arguments], check=False)
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
