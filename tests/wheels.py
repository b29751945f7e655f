"""Wheels from PyPI that only some long tests need, and that pip need not install."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_SECONDS_MAX = 120.0


def unpacked(folder: Path, requirement: str) -> Path:
    """Download a wheel, unpack it, and return the folder. Skips the test if pip cannot get it here."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, requirement], capture_output=True, text=True, timeout=_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip did not get {requirement} in time")
    if done.returncode:
        pytest.skip(f"pip cannot get {requirement}: {done.stderr.strip().splitlines()[-1]}")
    name = requirement.partition("==")[0].replace("-", "_")
    with zipfile.ZipFile(next(folder.glob(f"{name}-*.whl"))) as wheel:
        wheel.extractall(folder / name)
    return folder / name
