"""Implements `pawl up` in a module of its own, because only this command and the demo import the launcher."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pawl.chassis.process.start import StartError
from pawl.cli.command import Flags, fail
from pawl.cli.declared.commands import apply_at_start
from pawl.launcher.options import read_options
from pawl.launcher.up import up as run_suite


def up(
    context: typer.Context,
    *,
    port: Annotated[
        list[str] | None,
        typer.Option(help="name=number; 0 picks a free port, and `all` sets all other ports. Repeatable."),
    ] = None,
    replicas: Annotated[list[str] | None, typer.Option(help="service=count. Repeatable.")] = None,
) -> None:
    """Start the suite on this machine.

    Runs PostgreSQL, NATS and the services until Ctrl-C. Without
    OPENAI_API_KEY or OPENAI_BASE_URL it also runs a scripted model. All data
    is in the folder given by --data or PAWL_DATA (default: .pawl).
    """
    given: Flags = context.obj
    try:
        options = read_options(os.environ, data=given["data"], ports=port or (), replicas=replicas or ())
    except StartError as error:
        raise typer.Exit(fail(error, [])) from None
    raise typer.Exit(run_suite(options, lambda suite: apply_at_start(suite.options)))
