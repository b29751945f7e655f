"""`pawl tools check` and `pawl model check`: programs of services; the command line knows only the public API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

import typer

from pawl.cli.command import Flags


def check(context: typer.Context) -> None:
    """Look at Python tools, without a suite and without a model; `pawl tools check --help` says more.

    It gets everything that stands behind `check`.
    """
    flags: Flags = context.obj
    arguments = list(context.args)
    if flags.store is not None:
        arguments += ["--store", flags.store]
    if flags.user is not None:
        arguments += ["--user", flags.user]
    run_program("pawl.tool_registry.check", arguments)


def check_model(context: typer.Context) -> None:
    """Probe a model server and print the settings that fit it; `pawl model check --help` says more.

    Its key is OPENAI_API_KEY. It costs four short answers.
    """
    run_program("pawl.agent_loop.check", context.args)


def run_program(program: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
    """Run a program of a service, and end with its exit code."""
    done = subprocess.run([sys.executable, "-m", program, *arguments], check=False, env=environment)
    raise typer.Exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)
