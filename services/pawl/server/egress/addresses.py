"""Classifies IP addresses (public, private or never reachable), and looks up names.

The ranges are from the IANA registries of special-purpose addresses (RFC 6890) as of 2026. Python's own tables differ
between versions.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, TypeAlias

from aiohappyeyeballs import AddrInfoType as AddressInfo

from pawl.server.rpc.fairness import FairSlots

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class Reach(StrEnum):
    # Public internet addresses.
    PUBLIC = "PUBLIC"
    # Loopback and private networks: reachable only if the deployment allows them.
    PRIVATE = "PRIVATE"
    # Cloud metadata, link-local, multicast, reserved and tunnelled addresses. No setting allows them.
    NEVER = "NEVER"


_PRIVATE: Final = tuple(
    map(
        ip_network,
        (
            "10.0.0.0/8",
            "100.64.0.0/10",  # RFC 6598, carrier-grade NAT
            "127.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "198.18.0.0/15",  # RFC 2544, benchmarks; also what some proxies hand out
            "::1/128",
            "fc00::/7",  # RFC 4193, unique local
        ),
    )
)
_NEVER: Final = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",  # link-local, with the metadata of most clouds
            "192.0.0.0/24",  # IETF protocols, with the metadata of one cloud
            "192.0.2.0/24",  # documentation, as 198.51.100.0/24 and 203.0.113.0/24
            "192.88.99.0/24",  # relays of 6to4
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
            # Metadata addresses inside other ranges.
            "100.100.100.200/32",
            "168.63.129.16/32",
            "fd00:ec2::254/128",
            "fd20:ce::254/128",
            # Exceptions within 2000::/3, the public IPv6 range.
            "2001::/23",  # IETF protocols, with Teredo
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3fff::/20",
        ),
    )
)
_PUBLIC_IPV6: Final = IPv6Network("2000::/3")
_NAT64: Final = IPv6Network("64:ff9b::/96")


def plain_address(text: str) -> Address:
    """Parse an address from a resolver. An IPv4-mapped IPv6 address (`::ffff:1.2.3.4`) becomes IPv4.

    Raises:
        ValueError: The text is not an address.
    """
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def reach_of(address: Address) -> Reach:
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return reach_of(address.ipv4_mapped)
        if address.scope_id is not None:
            return Reach.NEVER
        if address in _NAT64:
            # RFC 6052, 3.1: this prefix is for public addresses only.
            inside = IPv4Address(int(address) & 0xFFFFFFFF)
            return Reach.PUBLIC if reach_of(inside) is Reach.PUBLIC else Reach.NEVER
    if any(address in network for network in _NEVER):
        return Reach.NEVER
    if any(address in network for network in _PRIVATE):
        return Reach.PRIVATE
    is_public = isinstance(address, IPv4Address) or address in _PUBLIC_IPV6
    return Reach.PUBLIC if is_public else Reach.NEVER


def can_be_opened(network: Network) -> bool:
    if any(network.version == other.version and network.subnet_of(other) for other in _NEVER):  # type: ignore[arg-type]
        return False
    return any(network.version == other.version and network.subnet_of(other) for other in _PRIVATE)  # type: ignore[arg-type]


# Maximum number of concurrent name lookups.
AT_ONCE_MAX: Final = 128

# Resolves host and port to addresses, the preferred ones first; raises OSError if there are none.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def look_up(host: str, port: int) -> Sequence[AddressInfo]:
    """Look up the addresses of a host, like `socket.getaddrinfo`.

    Each call uses its own daemon thread, because uvloop has only two threads for all lookups.

    Raises:
        OSError: The lookup failed.
    """
    # Passed as bytes, which getaddrinfo does not encode again.
    loop, name = asyncio.get_running_loop(), host.encode("ascii")
    answer: asyncio.Future[Sequence[AddressInfo]] = loop.create_future()

    def ask() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(answer.set_result, socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001  # the caller gets any error
            settle = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    threading.Thread(target=ask, name="lookup", daemon=True).start()
    return await answer


async def resolve_by_system(host: str, port: int) -> list[str]:
    return [str(sockaddr[0]) for *_, sockaddr in await look_up(host, port)]


class Lookups:
    """Limits the number of concurrent name lookups, which cannot be cancelled. Each key (a store) has a quota."""

    def __init__(self, resolve: Resolve = resolve_by_system, *, at_once_max: int = AT_ONCE_MAX) -> None:
        self._resolve = resolve
        self._slots = FairSlots(at_once_max)

    async def start(self, key: Hashable, host: str, port: int) -> asyncio.Future[Sequence[str]]:
        """Start a lookup and return it. If the caller is cancelled, the lookup continues.

        Waits while the key's quota is used up. Safe to cancel during this wait.
        """
        await self._slots.enter(key)
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._slots.leave_after(lookup, key)
        return lookup
