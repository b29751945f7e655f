"""The command line imports a command only when it is called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pawl.cli.__main__ import COMMANDS, load

UNREACHABLE = "127.0.0.1:1"


def test_help_shows_the_first_sentence_of_each_command() -> None:
    """The sentences are in a table, so help need not import the commands."""
    for name, (_, first) in COMMANDS.items():
        assert load(name).get_short_help_str(200) in {first, first.removesuffix(".")}, name


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        ("-h", "grpc pydantic rich pawl.client"),
        ("runs", "structlog asyncpg nats pydantic pawl.cli.jobs pawl.notify.v1"),
    ],
)
def test_help_and_a_command_import_only_what_they_need(command: str, unused: str) -> None:
    program = f"import atexit, sys; sys.argv = ['pawl', {command!r}]; from pawl.cli import main\n"
    program += f"atexit.register(lambda: print('imported', {{*{unused.split()}}} & {{*sys.modules}})); main()"
    environment = {**os.environ, "PAWL_ADDRESS": UNREACHABLE}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "imported set()", done.stderr
