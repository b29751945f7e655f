"""Loads the program `pawl` and its commands once, because loading them is slow."""

from __future__ import annotations

import functools

import typer.main

from pawl.cli import __main__ as program

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(program.app)
program.load = functools.cache(program.load)
for name in program.COMMANDS:
    program.load(name)
