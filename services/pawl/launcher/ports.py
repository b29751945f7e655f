"""Finds free ports, and checks chosen ports."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator, Mapping
from typing import Final

from pawl.chassis.process.start import StartError

# Systems use ephemeral ports only above this range: Linux from 32768, macOS and Windows from 49152.
_NOT_EPHEMERAL = range(12_000, 32_768)

# A process reserves this many ports at a time.
_BLOCK = 64

# Everything that the launcher starts listens only on this address.
HOST = "127.0.0.1"


_PROBLEMS: Final[Mapping[int, str]] = {
    errno.EADDRINUSE: "is already in use",
    errno.EACCES: "needs more rights than this user has",
}


def check_ports(chosen: Mapping[str, int]) -> None:
    """Check that a server can listen on each port. 0 means any free port.

    Raises:
        StartError: A port cannot be used. The message names each such port and its purpose.
    """
    taken: dict[int, str] = {}
    problems: list[str] = []
    for purpose, port in chosen.items():
        first = taken.setdefault(port, purpose)
        problem = f"is also chosen for {first}" if port and first != purpose else _problem(port)
        if problem:
            problems.append(f"Port {port} for {purpose} {problem}.")
    if problems:
        advice = "Choose others with --port NAME=NUMBER; --port all=0 uses free ports."
        raise StartError(" ".join([*problems, advice]))


def _problem(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Servers set this too. A port whose last connections are in TIME_WAIT then counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return _PROBLEMS.get(error.errno or 0, f"cannot be used ({error.strerror})")
    return ""


def free_port() -> int:
    """Return a free port that no other launcher on this machine will use while this process runs.

    The port is outside the ephemeral range, so the system does not use it for an outgoing connection before the server
    listens.
    """
    while True:
        port = next(_own_ports)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def _blocks_of_ports() -> Iterator[int]:
    """Yield ports from blocks that this process reserves. A UDP socket on a block's first port marks it as reserved."""
    while True:
        first = random.randrange(_NOT_EPHEMERAL.start, _NOT_EPHEMERAL.stop - _BLOCK, _BLOCK)  # noqa: S311 - no secret
        sign = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            sign.bind((HOST, first))
        except OSError:
            sign.close()
            continue
        sign.detach()  # It stays open until the process ends, which releases the block.
        yield from range(first, first + _BLOCK)


_own_ports = _blocks_of_ports()


def address(port: int) -> str:
    """Return this port on the loopback interface as host:port. 0 means any free port.

    For the launcher's servers, the system never chooses the port, because it could assign that port to a connection
    while the server restarts.
    """
    return f"{HOST}:{port or free_port()}"
