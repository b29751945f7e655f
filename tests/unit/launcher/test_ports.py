"""Port blocks that belong to one launcher."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from pawl.launcher.ports import HOST

PROGRAM = "from pawl.launcher.ports import free_port; print(free_port(), flush=True); input()"


def test_a_port_block_is_held_quietly_until_its_process_ends() -> None:
    """Holding the first port of the block marks it as taken."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        _, complaints = process.communicate("\n", timeout=60)
    assert complaints == ""
