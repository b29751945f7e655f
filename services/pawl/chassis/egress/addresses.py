"""The addresses of the public internet, those that are not, and those that are nobody's business at all.

From the IANA registries of special-purpose addresses (RFC 6890) as of 2026. The
tables are our own because those of Python differ from version to version.
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

from pawl.chassis.rpc.shares import Places

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network


class Reach(StrEnum):
    """The reach of an address: whether requests may be sent to it."""

    PUBLIC = "PUBLIC"
    """Anybody's server."""
    PRIVATE = "PRIVATE"
    """This machine, or one of the network that it is in: only where the deployment says so."""
    NEVER = "NEVER"
    """Metadata of clouds, link-local, multicast, reserved and tunnelled addresses: nothing that is said opens them."""


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
            # Metadata that hides among addresses of other kinds.
            "100.100.100.200/32",
            "168.63.129.16/32",
            "fd00:ec2::254/128",
            "fd20:ce::254/128",
            # Of 2000::/3, which is what there is of public IPv6.
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
    """Return an address that a resolver gave, an IPv4 address inside an IPv6 one (`::ffff:1.2.3.4`) as what it is.

    Raises:
        ValueError: it is no address.
    """
    address = ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def reach_of(address: Address) -> Reach:
    """Return who an address belongs to."""
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
    """Return whether a deployment may name a network as one that may be reached."""
    if any(network.version == other.version and network.subnet_of(other) for other in _NEVER):  # type: ignore[arg-type]
        return False
    return any(network.version == other.version and network.subnet_of(other) for other in _PRIVATE)  # type: ignore[arg-type]


AT_ONCE_MAX: Final = 128
"""Names that are looked up at the same time."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From host and port to addresses, the preferred ones first; raises OSError if there are none."""


async def look_up(host: str, port: int) -> Sequence[AddressInfo]:
    """Return what the operating system knows of a host, as `socket.getaddrinfo` does.

    Each call has a thread of its own, which does not keep the process alive: uvloop has two for all names.

    Raises:
        OSError: there is no such host.
    """
    # As bytes, for which there is nothing to be encoded by rules of its own.
    loop, name = asyncio.get_running_loop(), host.encode("ascii")
    answer: asyncio.Future[Sequence[AddressInfo]] = loop.create_future()

    def ask() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(answer.set_result, socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is for whoever waits
            settle = partial(answer.set_exception, error)
        with suppress(RuntimeError):  # The loop is closed.
            loop.call_soon_threadsafe(lambda: None if answer.done() else settle())

    threading.Thread(target=ask, name="lookup", daemon=True).start()
    return await answer


async def resolve_by_system(host: str, port: int) -> list[str]:
    """Return the addresses of a host as the operating system knows them."""
    return [str(sockaddr[0]) for *_, sockaddr in await look_up(host, port)]


class Lookups:
    """Look-ups, so many at once, which cannot be stopped, and of which each key (a store) has its share."""

    def __init__(self, resolve: Resolve = resolve_by_system, *, at_once_max: int = AT_ONCE_MAX) -> None:
        self._resolve = resolve
        self._places = Places(at_once_max)

    async def begin(self, key: Hashable, host: str, port: int) -> asyncio.Future[Sequence[str]]:
        """Start a lookup and return it; it continues if the caller is cancelled.

        Waits while the key has its share. Safe to cancel until it returns.
        """
        await self._places.enter(key)
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._places.leave_after(lookup, key)
        return lookup
