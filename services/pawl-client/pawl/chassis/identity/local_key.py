"""Finds the API key for a client's request, and decides whether it may be sent unencrypted."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pawl.chassis.process.address import is_loopback, split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import read_endpoints

# The file name in the secrets folder.
LOCAL_KEY = "local-key"
# The variable that lets a client send its key unencrypted to other machines.
IN_CLEAR: Final = "PAWL_KEY_IN_CLEAR"
# The files in which Linux lists listening sockets.
LISTENERS: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_LISTEN: Final = "0A"
# Column numbers in these files.
_LOCAL_ADDRESS, _STATE, _USER = 1, 3, 7


class KeyInClear(StartError):
    """Raised when a key would be sent unencrypted over a network."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"The key would be sent to {address} unencrypted, where others could read and use it. To use TLS, pass the"
            " file of the server's certificate authority: --ca FILE or PAWL_TLS_CA_FILE, or `authority` of a Worker"
            " or a Client."
            " To send it anyway, in a private network only, use"
            f" --key-in-clear or {IN_CLEAR}=1, or `key_in_clear` of a Worker or a Client."
        )


def check_hidden(addresses: Iterable[str], *, speaks_tls: bool, in_clear: bool) -> None:
    """Check that a key may be sent to these addresses.

    With `in_clear`, it may be sent unencrypted to other machines.

    Raises:
        KeyInClear: An address is on another machine, TLS is not used, and `in_clear` is False.
        ValueError: One of the strings is not an address.
    """
    beyond = [address for address in addresses if not (speaks_tls or in_clear or is_loopback(address))]
    if beyond:
        raise KeyInClear(beyond[0])


def find_key(addresses: Iterable[str], *, data: Path | None = None, environment: Mapping[str, str]) -> str | None:
    """Return the key to send to these addresses: PAWL_API_KEY, or the key of the suite that listens on all of them.

    The suite's folder is `data`. By default, it is PAWL_DATA or, failing that, `.pawl`. The suite's key is returned
    only for the suite's own addresses, and only while its launcher is running. If another user's process listens on one
    of the addresses, no key is returned, because that process may have taken over the port of a stopped service.
    Therefore, call this again for each request. On systems without LISTENERS, users are not compared.
    """
    given = environment.get("PAWL_API_KEY")
    if given:
        return given
    folder = data or Path(environment.get("PAWL_DATA") or ".pawl")
    wanted = set(addresses)
    if not wanted <= _listening(folder):
        return None
    try:
        descriptor = os.open(folder / "secrets" / LOCAL_KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="utf-8") as file:
            owner = os.fstat(descriptor).st_uid
            key = file.read().strip() or None
        tables = [path.read_text(encoding="ascii") for path in LISTENERS if path.exists()]
        is_own = all(users_at(address, tables) <= {owner} for address in wanted)
    except (OSError, ValueError):
        return None
    return key if is_own else None


def users_at(address: str, tables: Iterable[str]) -> set[int]:
    """Return the ids of users whose processes may accept connections at an address, from /proc/net/tcp and tcp6.

    Raises:
        ValueError: The address is not an IP address and a port.
    """
    host, port = split_address(address)
    wanted = ipaddress.ip_address(host)
    found = set[int]()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        fields = line.split()
        text, _, number = fields[_LOCAL_ADDRESS].partition(":")
        if fields[_STATE] == _LISTEN and int(number, 16) == port and _accepts(_read_host(text), wanted):
            found.add(int(fields[_USER]))
    return found


def _read_host(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address from one of LISTENERS. It consists of four-byte words in the machine's byte order."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return getattr(address, "ipv4_mapped", None) or address


def _accepts(
    listening: ipaddress.IPv4Address | ipaddress.IPv6Address, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> bool:
    """Return whether a listener may accept connections to an address. A listener on `::` may also accept IPv4."""
    if listening.is_unspecified:
        return listening.version >= wanted.version
    return listening == wanted


def _listening(data: Path) -> set[str]:
    """Return the loopback addresses of a data folder's suite, or an empty set if its launcher has ended."""
    endpoints = read_endpoints(data)
    if endpoints is None:
        return set()
    try:
        os.kill(endpoints.launcher_pid, 0)
        return {address for name in endpoints.services for address in endpoints.addresses(name) if is_loopback(address)}
    except (OSError, OverflowError, ValueError):
        return set()
