"""The process of one call: a guard, and in a group of its own the worker that runs the tool.

The guard forks the worker while it has one thread and nothing of anybody, runs no
code of the tool, and ends when the worker has ended or the registry has closed
the control socket, be it because it died. Then the guard kills the worker, its
group and, on Linux, whatever else descends from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from pawl.tool_registry.adapters.process.worker import run_worker
from pawl.tool_registry.sdk.tool import tool

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_REAP_SECONDS: Final = 0.005
_IS_LINUX: Final = sys.platform == "linux"


def main() -> None:
    """Run as `PROGRAM CONTROL CHANNEL`, the numbers of two sockets of the registry."""
    numbers = [int(number) for number in sys.argv[-2:]]
    _close_all_but(numbers)
    control, channel = (socket.socket(fileno=number) for number in numbers)
    wake, woken = socket.socketpair()
    woken.settimeout(0)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    if _IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    tool(_practise)
    guard = os.getpid()
    worker = os.fork()
    if not worker:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for other in (control, wake, woken):
            other.close()
        _stand_alone(guard)
        run_worker(channel)
    channel.close()
    status = _end(worker, _wait(worker, control, wake))
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


def _stand_alone(guard: int) -> None:
    """Leave the guard's group and its input, and do not outlive the guard where the system can see to that."""
    os.setsid()
    if _IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(1, 2)


def _wait(worker: int, control: socket.socket, wake: socket.socket) -> int | None:
    """Return how the worker ended, as `os.wait` says it, or None when nobody wants its result any more."""
    while True:
        ended, status = os.waitpid(worker, os.WNOHANG)
        if ended:
            return status
        ready, _, _ = select.select([control, wake], [], [])
        if control in ready and not control.recv(1):
            os.kill(worker, signal.SIGKILL)
            return None
        if wake in ready:
            wake.recv(4096)


def _end(worker: int, status: int | None) -> int:
    """Kill all that descends from the worker; returns how the worker itself ended."""
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    while True:
        try:
            ended, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status or 0
        if ended == worker:
            status = how
        if not ended:
            for orphan in _children():
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)
            time.sleep(_REAP_SECONDS)


def _children() -> list[int]:
    """Return the children of this process, those included that it got when their parent ended. Linux only."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(place.name))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
