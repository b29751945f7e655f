"""The process of one call: a guard, and in a group of its own the worker that runs the tool.

The guard forks the worker while it has one thread and nothing of any user, and runs no code of the tool. It kills
everything that descends from the worker once the worker has ended or the registry has closed the control socket, even
if the registry died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from pawl.tool_registry.sdk.tool import tool
from pawl.tool_registry.sources.process.worker import run_worker
from pawl.tool_registry.sources.python.guard import Guard


def main() -> None:
    """Run as `PROGRAM CONTROL CHANNEL`, the numbers of two sockets of the registry."""
    numbers = [int(number) for number in sys.argv[-2:]]
    _close_all_but(numbers)
    control, channel = (socket.socket(fileno=number) for number in numbers)
    guard = Guard()
    tool(_practise)
    if not guard.fork():
        control.close()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(1, 2)
        run_worker(channel)
    channel.close()
    guard.watch(control)
    status = guard.end()
    with contextlib.suppress(OSError):
        control.sendall(b"%d" % status)
    os._exit(0)


def _practise(times: int = 1) -> None:
    """Be the first tool of the process, which takes a hundred times as long to make as the next."""


def _close_all_but(numbers: list[int]) -> None:
    """Close what the start has left open; how much that is depends on the event loop of the registry."""
    first = 3
    for number in (*sorted(numbers), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, number)
        first = number + 1
