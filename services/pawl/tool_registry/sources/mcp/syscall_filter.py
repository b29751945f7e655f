"""The system calls that a confined program is refused, as a program for seccomp.

Landlock says nothing about sockets that have a path: whoever may write to the
file may connect. Behind some of them others do what they are told, as the user
(Docker, the bus of a desktop, an agent with keys). Which one a program means is
in its memory, where no filter can look; so it gets no socket of that family.
Pairs of them, which programs make for those that they start, stay.

Nor does Landlock say anything about limits and priorities. Who may set those of
another process of the same user can end it (a second of processor time) or have
it wait for ever; so a program sets its own.

Nor of the keyrings of the kernel, where other programs of the same user keep
tickets and passwords; so a program has none.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# Offsets in `struct seccomp_data`; of arguments, which are 64 bits, the lower half.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST: Final = 16
_SECOND: Final = 24

# Instructions of BPF.
_LOAD: Final = 0x20
_AND: Final = 0x54
_IF_EQUAL: Final = 0x15
_IF_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06

_KILL: Final = 0x80000000
_REFUSE: Final = 0x00050000
_ALLOW: Final = 0x7FFF0000

_TYPE_MASK: Final = 0xF
_IO_URING_SETUP: Final = 425
_X32: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class _Machine:
    architecture: int
    socket: int
    socketpair: int
    of_process: tuple[int, ...]
    """Calls whose first argument is a process, 0 for the caller: prlimit64, and sched_set with -param, -scheduler,
    -affinity and -attr."""
    of_processes: Mapping[int, int]
    """Calls whose first argument is what the second one is, by that of a process: setpriority, ioprio_set."""
    of_keyrings: tuple[int, ...]
    """Calls that reach a keyring: add_key, request_key and keyctl."""


_MACHINES: Final[Mapping[str, _Machine]] = MappingProxyType(
    {
        "x86_64": _Machine(0xC000003E, 41, 53, (302, 142, 144, 203, 314), {141: 0, 251: 1}, (248, 249, 250)),
        "aarch64": _Machine(0xC00000B7, 198, 199, (261, 118, 119, 122, 274), {140: 0, 30: 1}, (217, 218, 219)),
    }
)


def syscall_filter(machine: str = os.uname().machine) -> bytes:
    """Return the filter for a machine, by its name in uname; empty if it is none that is known here.

    Refused are sockets of the family unix, pairs of those that can be turned to
    another address (datagrams), and io_uring, which makes sockets past the filter;
    to set limits, priorities and processors of any process but the caller; and keyrings.
    Code for another architecture ends at its first call: its calls have other numbers.
    """
    known = _MACHINES.get(machine)
    if known is None:
        return b""
    refused = _REFUSE | errno.EACCES
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, known.architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_IF_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _REFUSE | errno.ENOSYS),
        *(step for number in known.of_keyrings for step in ((_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused))),
        *(step for number in known.of_process for step in _only(number, {_FIRST: 0})),
        *(step for number, kind in known.of_processes.items() for step in _only(number, {_FIRST: kind, _SECOND: 0})),
        (_IF_EQUAL, 0, 3, known.socket),
        (_LOAD, 0, 0, _FIRST),
        (_IF_EQUAL, 6, 0, socket.AF_UNIX),
        (_RETURN, 0, 0, _ALLOW),
        (_IF_EQUAL, 0, 5, known.socketpair),
        (_LOAD, 0, 0, _SECOND),
        (_AND, 0, 0, _TYPE_MASK),
        (_IF_EQUAL, 2, 0, socket.SOCK_STREAM),
        (_IF_EQUAL, 1, 0, socket.SOCK_SEQPACKET),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _only(number: int, wanted: Mapping[int, int]) -> list[tuple[int, int, int, int]]:
    """Return the steps that refuse a call unless its arguments are these; they leave other calls as they found them."""
    checks = [
        step
        for place, value in wanted.items()
        for step in (
            (_LOAD, 0, 0, place),
            (_IF_EQUAL, 1, 0, value),
            (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        )
    ]
    allow = (_RETURN, 0, 0, _ALLOW)
    return [(_IF_EQUAL, 0, len(checks) + 1, number), *checks, allow]
