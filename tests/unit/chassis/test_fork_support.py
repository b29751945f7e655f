"""Whoever starts a program must not run gRPC's fork handlers in the child."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENTRIES = [
    "pawl.agent_loop.__main__",
    "pawl.job_store.__main__",
    "pawl.notifier.__main__",
    "pawl.tool_registry.__main__",
    "pawl.cli.__main__",
    "pawl.launcher",
    "pawl.worker",
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_fork_support_is_off_before_grpc_is_imported(entry: str) -> None:
    """gRPC reads the variable once, at its own import: what the chassis sets after that has no effect."""
    command = [sys.executable, "-X", "importtime", "-c", f"import {entry}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    imported = [line.rpartition("|")[2].strip() for line in told.splitlines()]
    assert imported.index("pawl.chassis") < imported.index("grpc._cython.cygrpc")
