"""A parser and formatter for `host:port` addresses. Does not require the settings library."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import urlsplit

_PORT_MAX: Final = 65535


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port`, or `[::1]:7601`, into the host and the port.

    Raises:
        ValueError: The text is malformed, or the port is over 65535.
    """
    host, _, port = address.rpartition(":")
    if "://" in address:
        raise ValueError("must be host:port without a scheme, for example 127.0.0.1:7601")
    if not (host and port.isascii() and port.isdecimal() and int(port) <= _PORT_MAX):
        raise ValueError("must be host:port, for example 127.0.0.1:7601")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[::1]:7601` for an IPv6 address. This is the inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_safe_url(url: str) -> bool:
    """Return whether a URL is safe to fetch.

    It must use https (or http on this machine) and have no user name, query or fragment.
    """
    try:
        parts = urlsplit(url)
        is_here = is_loopback(f"{parts.hostname}:{parts.port or 80}")
    except ValueError:
        return False
    bare = parts.username is None and not parts.query and not parts.fragment
    return bool(parts.hostname) and bare and (parts.scheme == "https" or (parts.scheme == "http" and is_here))
