"""Builds the seccomp filter that refuses certain system calls by confined programs.

Landlock does not restrict Unix sockets with a path. Any process that can write to the socket's file can connect. Some
of these sockets belong to services that act with the user's rights (Docker, a desktop bus, ssh-agent). A filter cannot
read the address of a connection, because it is in the program's memory. The program therefore gets no Unix sockets at
all, except socket pairs, which programs create for their children.

Landlock does not restrict limits and priorities either. A process that can set them for another process of the same
user can kill that process (with a limit of one second of CPU time) or stall it. A program may therefore set only its
own limits and priorities.

Nor does Landlock restrict kernel keyrings, where the same user's other programs keep tickets and passwords. A program
therefore has no access to keyrings.
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

# Offsets in `struct seccomp_data`. Arguments are 64 bits long; these are the offsets of their lower halves.
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4
_FIRST: Final = 16
_SECOND: Final = 24

# BPF instructions.
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
    # Calls whose first argument is a process, or 0 for the caller: prlimit64, and sched_set with -param, -scheduler,
    # -affinity and -attr.
    of_process: tuple[int, ...]
    # Calls whose first argument is the kind of the second, keyed by the value that means a process: setpriority,
    # ioprio_set.
    of_processes: Mapping[int, int]
    # Calls that access a keyring: add_key, request_key and keyctl.
    of_keyrings: tuple[int, ...]


_MACHINES: Final[Mapping[str, _Machine]] = MappingProxyType(
    {
        "x86_64": _Machine(0xC000003E, 41, 53, (302, 142, 144, 203, 314), {141: 0, 251: 1}, (248, 249, 250)),
        "aarch64": _Machine(0xC00000B7, 198, 199, (261, 118, 119, 122, 274), {140: 0, 30: 1}, (217, 218, 219)),
    }
)


def syscall_filter(machine: str = os.uname().machine) -> bytes:
    """Return the filter for a machine, given its uname name, or an empty filter if the machine is unknown.

    The filter refuses Unix sockets; Unix datagram pairs, which can be redirected to another address; io_uring, which
    can create sockets unnoticed by the filter; setting other processes' limits, priorities and CPU affinity; and
    keyrings. Code for another architecture is killed at its first call, because its calls have different numbers.
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
    """Return the filter steps that refuse a system call unless it has these arguments. Other calls are not affected."""
    checks = [
        step
        for offset, value in wanted.items()
        for step in (
            (_LOAD, 0, 0, offset),
            (_IF_EQUAL, 1, 0, value),
            (_RETURN, 0, 0, _REFUSE | errno.EPERM),
        )
    ]
    allow = (_RETURN, 0, 0, _ALLOW)
    return [(_IF_EQUAL, 0, len(checks) + 1, number), *checks, allow]
