"""Ports: whether one is free, and which one is."""

from __future__ import annotations

import errno
import socket

from pawl.chassis.start import StartError

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
    """A port that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def address(port: int) -> str:
    """That port on the loopback interface, as host:port."""
    return f"{HOST}:{port}"
