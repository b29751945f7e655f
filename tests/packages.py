"""Packages from PyPI and Debian that only some long tests need. They are fetched on demand and never installed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_SECONDS_MAX = 240.0


def wheel(folder: Path, requirement: str) -> Path:
    """Download and unpack a wheel. Return its folder. Skip the test if pip cannot get the wheel here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    _run([*command, requirement], folder, requirement)
    name = requirement.partition("==")[0].replace("-", "_")
    with zipfile.ZipFile(next(folder.glob(f"{name}-*.whl"))) as archive:
        archive.extractall(folder / name)
    return folder / name


def debian(folder: Path, name: str) -> Path:
    """Download and unpack a Debian package. Return its folder. Skip the test if apt-get cannot get it here."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run(["apt-get", "download", name], folder, name)
    except pytest.skip.Exception:
        # A new machine has no list of packages.
        _run(["apt-get", "update"], folder, name)
        _run(["apt-get", "download", name], folder, name)
    _run(["dpkg", "-x", str(next(folder.glob(f"{name}_*.deb"))), "."], folder, name)
    return folder


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS_MAX, check=True)
    except FileNotFoundError:
        pytest.skip(f"there is no {command[0]} to get {what} with")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} did not get {what} in time")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{command[0]} cannot get {what}: {(error.stderr.strip().splitlines() or [''])[-1]}")
