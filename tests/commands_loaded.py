"""The program `pawl` with the tree of its commands, which takes most of a short command to build: loaded once."""

from __future__ import annotations

import functools

import typer.main

from pawl.cli.__main__ import app

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app)
