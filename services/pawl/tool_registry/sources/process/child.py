"""The code of the process for one call: a guard, and a worker in its own process group, which runs the tool.

The guard forks the worker while it has only one thread and no user data, and never runs tool code itself. Once the
worker has ended or the registry has closed the control socket (or died), the guard kills all the worker's descendants.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

from pawl.tool_registry.sources.process.worker import run_worker
from pawl.tool_registry.sources.python.guard import Guard
from pawl.tools.sdk.tool import tool


def main() -> None:
    """Run as `PROGRAM CONTROL CHANNEL`. The arguments are the file descriptors of two sockets to the registry."""
    numbers = [int(number) for number in sys.argv[-2:]]
    _close_all_but(numbers)
    control, channel = (socket.socket(fileno=number) for number in numbers)
    guard = Guard()
    tool(_warm_up)
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


def _warm_up(times: int = 1) -> None:
    """A throwaway tool. Building the first tool fills caches, and takes a hundred times as long as building another."""


def _close_all_but(numbers: list[int]) -> None:
    """Close all inherited file descriptors except these. Their number depends on the registry's event loop."""
    first = 3
    for number in (*sorted(numbers), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, number)
        first = number + 1
