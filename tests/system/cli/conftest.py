"""One suite for all tests of the command line, which run commands as users run them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import commands
from tests.poll import wait_until
from tests.servers import open_folder
from tests.tidy.tree import ROOT

_START_SECONDS = 240.0
_PATIENCE_SECONDS = 120.0


class CommandLine:
    def __init__(self, data: Path, *flags: str) -> None:
        self.data = data
        self._flags = flags

    def user(self, name: str) -> CommandLine:
        return CommandLine(self.data, "--user", name)

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PAWL_", "OPENAI_"))}
        return kept | {"PAWL_DATA": str(self.data), "COLUMNS": "200"}

    def run(self, *arguments: str, keyboard: str = "") -> tuple[int, str, str]:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            done = commands.pawl(*self._flags, *arguments, environment=self.environment(), keyboard=keyboard)
            # The suite runs: an overloaded machine kept it from answering in time.
            if not done.errors.startswith("No Pawl suite answers") or time.monotonic() > deadline:
                break
        assert "Traceback" not in done.errors
        return done.code, done.output, done.errors

    def succeed(self, *arguments: str, keyboard: str = "") -> str:
        code, output, errors = self.run(*arguments, keyboard=keyboard)
        assert code == 0, errors + output
        return output

    def refuse(self, *arguments: str) -> str:
        code, _, errors = self.run(*arguments)
        assert code == 2, f"{arguments}: {errors}"
        return errors

    def done(self, *arguments: str) -> str:
        run_id = self.succeed("run", "--detach", *arguments).strip()
        self.succeed("watch", run_id)
        return run_id

    def started(self, *arguments: str) -> str:
        run_id = self.succeed("run", "--detach", *arguments).strip()
        self.until(lambda inbox: run_id in inbox, "inbox", "--list")
        return run_id

    def pending(self, run_id: str) -> str:
        return find(rf"run {run_id}  call (call_\w+)", self.succeed("inbox"))

    def until(self, check: Callable[[str], object], *arguments: str) -> str:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not check(output := self.succeed(*arguments)):
            assert time.monotonic() < deadline, output
        return output


@pytest.fixture(scope="package")
def pawl() -> Iterator[CommandLine]:
    with open_folder() as folder:
        line, product = CommandLine(folder / "data"), folder / "product"
        (product / "agents").mkdir(parents=True)
        (product / "pawl.yaml").write_text("name: product\n")
        (product / "agents" / "greeter.yaml").write_text("name: greeter\noptions: {instructions: Greet people.}\n")
        # The tools of this example find its page in the folder in which the suite starts.
        shutil.copytree(ROOT / "docs/examples/goals", folder, dirs_exist_ok=True)
        environment = line.environment() | {"PAWL_APPLY": str(product), "PAWL_TOOLS": str(folder / "my_tools")}
        with started(folder, environment, "up") as screen:
            shows(screen, "Pawl is running")
            yield line


@contextmanager
def started(folder: Path, environment: Mapping[str, str], *arguments: str) -> Iterator[Path]:
    """Run a command of `pawl` in a folder, yield the file with its output, and stop the command as Ctrl-C does."""
    screen = folder / "screen"
    with screen.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, "-m", "pawl.cli", *arguments, "--port", "all=0"],
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield screen
    finally:
        command.send_signal(signal.SIGINT)
        assert command.wait(120) == 0


def find(pattern: str, text: str) -> str:
    """Return the first group of the first match. Fail if there is none."""
    found = re.search(pattern, text)
    assert found is not None, text
    return found[1]


def shows(screen: Path, text: str) -> None:
    wait_until(lambda: text in screen.read_text(), screen.read_text)
