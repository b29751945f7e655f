"""One suite for all tests of the command line, and commands run as people run them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import commands
from tests.system.cli.shop import Shop

_START_SECONDS = 240.0
_PATIENCE_SECONDS = 120.0


class CommandLine:
    """Runs `pawl` against one data folder, without a terminal."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
        return kept | {"PAWL_DATA": str(self.data), "COLUMNS": "200"}

    def run(self, *arguments: str, keyboard: str = "") -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command."""
        done = commands.pawl(*arguments, environment=self.environment(), keyboard=keyboard)
        assert "Traceback" not in done.errors
        return done.code, done.output, done.errors

    def succeed(self, *arguments: str, keyboard: str = "") -> str:
        """The output of a command that must work."""
        code, output, errors = self.run(*arguments, keyboard=keyboard)
        assert code == 0, errors + output
        return output

    def until(self, check: Callable[[str], object], *arguments: str) -> str:
        """The output of a command that must work, once it is as it should be: it is given again and again."""
        give_up = time.monotonic() + _PATIENCE_SECONDS
        while not check(output := self.succeed(*arguments)):
            assert time.monotonic() < give_up, output
        return output


@pytest.fixture(scope="package")
def shop() -> Iterator[Shop]:
    """An HTTP service at the one private address that tools may reach."""
    with Shop() as shop:
        yield shop


@pytest.fixture(scope="package")
def pawl(shop: Shop) -> Iterator[CommandLine]:
    # Not pytest's folder: that is closed to the account under which PostgreSQL runs when the tests run as root.
    with tempfile.TemporaryDirectory(prefix="pawl-cli-") as folder:
        yield from _running(Path(folder), shop)


def _running(folder: Path, shop: Shop) -> Iterator[CommandLine]:
    line = CommandLine(folder / "data")
    egress = folder / "egress.json"
    egress.write_text(json.dumps({"*": {"private": [f"127.0.0.1:{shop.port}"]}}))
    agents = folder / "agents"
    agents.mkdir()
    (agents / "greeter.yaml").write_text("name: greeter\noptions: {instructions: Greet people.}\n")
    screen = folder / "screen"
    with screen.open("wb") as output:
        suite = subprocess.Popen(
            [sys.executable, "-m", "pawl.cli", "up", "--port", "all=0"],
            env=line.environment() | {"PAWL_EGRESS_FILE": str(egress), "PAWL_AGENTS": str(agents)},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        give_up = time.monotonic() + _START_SECONDS
        while "Pawl is running" not in screen.read_text():
            assert suite.poll() is None, screen.read_text()
            assert time.monotonic() < give_up, screen.read_text()
            time.sleep(0.1)
        yield line
    finally:
        suite.send_signal(signal.SIGINT)
        suite.wait(120)
