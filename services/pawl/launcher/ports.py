"""Ports: whether one is free, and which one is."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator, Mapping
from typing import Final

from pawl.chassis.process.start import StartError

_NEVER_HANDED_OUT = range(12_000, 32_768)
"""Systems give connections their ports above these: Linux from 32768, macOS and Windows from 49152."""

_BLOCK = 64
"""So many ports a process takes at a time."""

HOST = "127.0.0.1"
"""Everything that the launcher starts listens here and nowhere else."""


_PROBLEMS: Final[Mapping[int, str]] = {
    errno.EADDRINUSE: "is already in use",
    errno.EACCES: "needs more rights than this user has",
}


def check_ports(chosen: Mapping[str, int]) -> None:
    """Return if something can listen on each port; 0 stands for any free one.

    Raises:
        StartError: not on all of them; it names each with its purpose.
    """
    taken: dict[int, str] = {}
    told: list[str] = []
    for purpose, port in chosen.items():
        first = taken.setdefault(port, purpose)
        problem = f"cannot be that of {first}, too" if port and first != purpose else _problem(port)
        if problem:
            told.append(f"Port {port} for {purpose} {problem}.")
    if told:
        advice = "Choose others with --port NAME=NUMBER; --port all=0 takes a free one for each."
        raise StartError(" ".join([*told, advice]))


def _problem(port: int) -> str:
    """Return why nothing can listen on a port; empty if something can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still fading is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return _PROBLEMS.get(error.errno or 0, f"cannot be used ({error.strerror})")
    return ""


def free_port() -> int:
    """A port that nothing listens on at this moment, and that no launcher on this machine is given a second time.

    It is none that the system itself may hand to the next connection, which would take it before its server does.
    """
    while True:
        port = next(_own_ports)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def _blocks_of_ports() -> Iterator[int]:
    """Yield ports of blocks that this process takes: whose a block is says a datagram socket at its first port."""
    while True:
        first = random.randrange(_NEVER_HANDED_OUT.start, _NEVER_HANDED_OUT.stop - _BLOCK, _BLOCK)  # noqa: S311 - no secret
        sign = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sign.bind((HOST, first))
        except OSError:
            sign.close()
            continue
        sign.detach()  # It stays open: the end of the process gives the block back, and nothing before.
        yield from range(first, first + _BLOCK)


_own_ports = _blocks_of_ports()


def address(port: int) -> str:
    """That port on the loopback interface, as host:port; one that is free for 0.

    No server of the launcher lets the system choose, since it may give that port to a connection while the server is
    down for a moment.
    """
    return f"{HOST}:{port or free_port()}"
