"""The key that a client shows: that of a suite on one machine goes to that suite only, another one over TLS only."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pawl.chassis.process.settings import is_loopback, split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import read_endpoints

LOCAL_KEY = "local-key"
"""The name of its file in the folder of secrets."""
IN_CLEAR: Final = "PAWL_KEY_IN_CLEAR"
"""The variable with which a client sends its key unencrypted beyond this machine."""
LISTENERS: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""The files in which Linux says who listens."""

_LISTEN: Final = "0A"
# Fields of a line of those tables.
_LOCAL_ADDRESS, _STATE, _USER = 1, 3, 7


class KeyInClear(StartError):
    """A key would go over a network unencrypted: give the authority of the certificates there."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"The key would go to {address} unencrypted, and whoever hears it could call with it. Give the file with"
            " the certificates of its authority, to speak TLS: --ca FILE or PAWL_TLS_CA_FILE, `authority` of a Worker"
            " or a Client."
            " Or, in a private network in which nobody else listens, say that it may:"
            f" --key-in-clear or {IN_CLEAR}=1, `key_in_clear` of a Worker or a Client."
        )


def check_hidden(addresses: Iterable[str], *, speaks_tls: bool, in_clear: bool) -> None:
    """Return if a key may be sent to these addresses.

    Raises:
        KeyInClear: one of them is beyond this machine, without TLS, and `in_clear` does not allow it.
        ValueError: one is no address.
    """
    beyond = [address for address in addresses if not (speaks_tls or in_clear or is_loopback(address))]
    if beyond:
        raise KeyInClear(beyond[0])


def find_key(addresses: Iterable[str], *, data: Path | None = None, environment: Mapping[str, str]) -> str | None:
    """Return the key to send to these addresses now: PAWL_API_KEY, else that of the suite that listens on all of them.

    The suite is the one that runs on `data`, else on PAWL_DATA, else on `.pawl`.
    Its key is for it alone: there is none for other addresses, none once its
    launcher has ended, and none while a process of another user than the key's
    listens at one of them, who could have taken the port of a service that is down.
    So ask anew for each call. Where the machine has no LISTENERS, users are not compared.
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
    """Return the ids of the users whose processes may get a connection to an address, by /proc/net/tcp and tcp6.

    Raises:
        ValueError: it is not an IP address and a port.
    """
    host, port = split_address(address)
    wanted = ipaddress.ip_address(host)
    found = set[int]()
    for line in (line for table in tables for line in table.splitlines()[1:]):
        fields = line.split()
        text, _, number = fields[_LOCAL_ADDRESS].partition(":")
        if fields[_STATE] == _LISTEN and int(number, 16) == port and _takes(_read_host(text), wanted):
            found.add(int(fields[_USER]))
    return found


def _read_host(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address as the tables have it: in words of four bytes, each in the order of the machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    return getattr(address, "ipv4_mapped", None) or address


def _takes(
    listening: ipaddress.IPv4Address | ipaddress.IPv6Address, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address
) -> bool:
    """Return whether a listener gets connections to an address; one at `::` may take those of IPv4 as well."""
    if listening.is_unspecified:
        return listening.version >= wanted.version
    return listening == wanted


def _listening(data: Path) -> set[str]:
    """Return the addresses on this machine at which the suite of that folder says that it listens; none if it ended."""
    endpoints = read_endpoints(data)
    if endpoints is None:
        return set()
    try:
        os.kill(endpoints.launcher_pid, 0)
        return {address for name in endpoints.services for address in endpoints.addresses(name) if is_loopback(address)}
    except (OSError, OverflowError, ValueError):
        return set()
