"""The program `pawl` with its commands, which are slow to load, loaded once."""

from __future__ import annotations

import functools

import typer.main

from pawl.cli import __main__ as program

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(program.app)
program.load = functools.cache(program.load)
for name in program.COMMANDS:
    program.load(name)
