"""The guard of a program. It forks the program, waits for it, and kills all its descendants.

This module imports only the standard library, because nothing else is available to the processes that run guards.
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
from collections.abc import Callable
from pathlib import Path
from typing import Final

IS_LINUX: Final = sys.platform == "linux"

_SET_PDEATHSIG: Final = 1
_SET_CHILD_SUBREAPER: Final = 36
_KILL_SECONDS: Final = 5.0
_REAP_SECONDS: Final = 0.005


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Has no effect except on Linux."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants() -> list[int]:
    """Return this process's descendants, including orphans. Linux only."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        with contextlib.suppress(OSError):
            for thread in os.scandir(f"/proc/{waiting.pop()}/task"):
                children = [int(child) for child in Path(thread.path, "children").read_bytes().split()]
                found += children
                waiting += children
    return found


class Guard:
    def __init__(self) -> None:
        self._process = os.getpid()
        self._child = 0
        self._status: int | None = None
        self._wake, self._woken = socket.socketpair()
        self._woken.settimeout(0)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        prctl(_SET_CHILD_SUBREAPER, 1)

    def fork(self) -> int:
        """Fork. Return the child's process id, or 0 in the child.

        The child has its own session and default signals. On Linux, it dies with the guard.
        """
        self._child = os.fork()
        if self._child:
            return self._child
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self._wake.close()
        self._woken.close()
        os.setsid()
        prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if IS_LINUX and os.getppid() != self._process:
            os._exit(1)
        return 0

    def watch(
        self, control: socket.socket, *, check: Callable[[], str] = lambda: "", tick_seconds: float | None = None
    ) -> str:
        """Wait until the child has ended, the peer has closed `control`, or `check` returns a problem.

        `check` runs at least every `tick_seconds`. Return the problem, or an empty string if there was none.
        """
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while self._reap() and self._status is None:
            problem = check()
            if problem:
                return problem
            for descriptor, _ in poll.poll(None if tick_seconds is None else tick_seconds * 1000):
                if descriptor == self._wake.fileno():
                    self._wake.recv(4096)
                elif not control.recv(4096):
                    return ""
        return ""

    def end(self, *, grace_seconds: float = 0.0) -> int:
        """Kill the child and all its descendants. If `grace_seconds` is positive, send SIGTERM first.

        Return the child's status.
        """
        started = time.monotonic()
        if not self._child:
            return 0
        if grace_seconds:
            self._signal(signal.SIGTERM)
        while self._reap() and (passed := time.monotonic() - started) < _KILL_SECONDS:
            if passed >= grace_seconds:
                # Repeated, because new processes may have started since.
                self._signal(signal.SIGKILL)
            time.sleep(_REAP_SECONDS)
        return self._status or 0

    def _reap(self) -> bool:
        """Reap the processes that have ended. Return whether there are any others."""
        try:
            while True:
                process, status = os.waitpid(-1, os.WNOHANG)
                if process == self._child:
                    self._status = status
                if not process:
                    return True
        except ChildProcessError:
            return False

    def _signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._child, number)
        for process in descendants():
            with contextlib.suppress(OSError):
                os.kill(process, number)
