"""Prepares a child process and then becomes its program: `python -I -S child.py PARENT SIGNAL UID:GID PROGRAM ARGS...`.

This is a separate program, because code in a fork of a multi-threaded process can deadlock. It uses only the standard
library and starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Switch the user if requested, tie this process to its parent (on Linux), and run the program."""
    parent, death_signal, account, program = int(arguments[0]), int(arguments[1]), arguments[2], arguments[3:]
    os.umask(0o077)
    if account != "-":
        uid, gid = (int(number) for number in account.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # Set this after the change of user, which would clear it.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        # The parent ended before the death signal was set.
        os._exit(1)
    os.execv(program[0], program)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main(sys.argv[1:])
