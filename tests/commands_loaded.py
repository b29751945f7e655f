"""The program `pawl` with its command tree, which is slow to build, loaded once."""

from __future__ import annotations

import functools

import typer.main

from pawl.cli.__main__ import app

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(app)
