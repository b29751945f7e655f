"""Ports: whether one is free, and which one is."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from pawl.chassis.start import StartError

_NEVER_HANDED_OUT = range(12_000, 32_768)
"""Systems give connections their ports above these: Linux from 32768, macOS and Windows from 49152."""

HOST = "127.0.0.1"
"""Everything that the launcher starts listens here and nowhere else."""


def check_port(port: int, purpose: str) -> None:
    """Raises StartError if nothing can listen on that port. Port 0 stands for any free one and always passes."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still fading is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = {
                errno.EADDRINUSE: "is already in use",
                errno.EACCES: "needs more rights than this user has",
            }.get(error.errno or 0, f"cannot be used ({error.strerror})")
            raise StartError(
                f"Port {port} for {purpose} {reason}. Choose another with --port {purpose}=NUMBER; 0 takes a free one."
            ) from None


def free_port() -> int:
    """A port that nothing listens on at this moment.

    It is none that the system itself may hand to the next connection, which would take it before its server does.
    """
    while True:
        port = random.choice(_NEVER_HANDED_OUT)  # noqa: S311 - no secret
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def address(port: int) -> str:
    """That port on the loopback interface, as host:port."""
    return f"{HOST}:{port}"
