"""Rules for outbound requests: parses URLs and checks hosts and addresses.

URLs are parsed more strictly than RFC 3986 requires. Anything on which parsers disagree (user names, percent signs and
unusual numbers in a host) is refused, so that no later parser reads a different host.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Final
from urllib.parse import quote, urlsplit

import httpx2

from pawl.chassis.ids import StoreId
from pawl.server.egress.addresses import Address, Network, Reach, can_be_opened, reach_of

URL_CHARACTERS_MAX: Final = 8192
HOST_CHARACTERS_MAX: Final = 253
PORTS: Final = {"http": 80, "https": 443}

_PORT_MAX: Final = 65535
_LABEL: Final = re.compile(r"[a-z0-9_-]{1,63}")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT: Final = re.compile(r"[0-9]{1,5}")
_WHITE_OR_CONTROL: Final = re.compile(r"[\x00-\x20\x7f-\xa0\\]")
# Characters of a target that are not percent-encoded. They include "%", because existing encodings are kept.
_TARGET_SAFE: Final = "%/:@!$&'()*+,;=-._~?[]|^`{}"
# The IDNA full stop (RFC 3490, 3.1) that NFKC does not replace.
_IDEOGRAPHIC_STOP: Final = "\u3002"


class EgressRefused(Exception):
    """Raised for a request that must not be sent.

    The message contains no resolved addresses and may be shown to the model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parsed URL. `host` is a lower-case ASCII name, or an address as text."""

    scheme: str
    host: str
    port: int
    # Path and query, in ASCII.
    target: str
    # Set if the host is an address.
    address: Address | None

    @property
    def authority(self) -> str:
        """The host and port as in the Host header, without the default port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        return f"{self.scheme}://{self.authority}"

    @property
    def url(self) -> str:
        """The URL without its fragment."""
        return self.origin + self.target


def read_target(url: str) -> Target:
    """Parse a URL.

    Raises:
        EgressRefused: The URL is invalid, ambiguous, or neither http nor https.
    """
    if len(url) > URL_CHARACTERS_MAX:
        raise EgressRefused(f"a URL must be at most {URL_CHARACTERS_MAX} characters")
    if _WHITE_OR_CONTROL.search(url):
        raise EgressRefused("a URL must not contain whitespace, backslashes or control characters")
    try:
        url.encode()
        parts = urlsplit(url)
    except ValueError:
        raise EgressRefused("the URL is malformed") from None
    scheme = parts.scheme.lower()
    if scheme not in PORTS:
        raise EgressRefused("a URL must start with http:// or https://")
    if "@" in parts.netloc:
        raise EgressRefused("a URL must not contain a user name or password")
    host, address, port = _read_authority(parts.netloc)
    path = parts.path or "/"
    # urlsplit drops an empty query, which makes no difference to servers.
    target = quote(f"{path}?{parts.query}" if parts.query else path, safe=_TARGET_SAFE)
    return Target(
        scheme=scheme, host=host, port=PORTS[scheme] if port is None else port, target=target, address=address
    )


def _read_authority(text: str) -> tuple[str, Address | None, int | None]:
    if text.startswith("["):
        inner, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise EgressRefused("the URL's IPv6 host must be in brackets, and only a port may follow it")
        ipv6 = _read_ipv6(inner)
        return str(ipv6), ipv6, _read_port(rest.removeprefix(":"))
    name, _, port = text.partition(":")
    host, address = _read_host(name)
    return host, address, _read_port(port)


def _read_port(text: str) -> int | None:
    if not text:
        return None
    # isascii, because \d and int() accept digits of all scripts.
    if not (text.isascii() and _PORT.fullmatch(text)) or not 1 <= int(text) <= _PORT_MAX:
        raise EgressRefused(f"a URL's port must be between 1 and {_PORT_MAX}")
    return int(text)


def _read_ipv6(text: str) -> Address:
    try:
        address = IPv6Address(text)
    except ValueError:
        raise EgressRefused("the host in brackets is not an IPv6 address") from None
    if address.scope_id is not None:
        raise EgressRefused("an address must not have a zone")
    return address.ipv4_mapped or address


def _read_host(text: str) -> tuple[str, Address | None]:
    host = unicodedata.normalize("NFKC", text).replace(_IDEOGRAPHIC_STOP, ".").lower()
    if not host.isascii():
        try:
            host = httpx2.URL(scheme="http", host=host).raw_host.decode("ascii").lower()
        except (httpx2.InvalidURL, UnicodeError, ValueError):
            raise EgressRefused("the URL's host is not a valid hostname") from None
    host = host.removesuffix(".")
    labels = host.split(".")
    if len(host) > HOST_CHARACTERS_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise EgressRefused("the URL's host is not a valid hostname")
    if not _NUMBER.fullmatch(labels[-1]):
        return host, None
    # WHATWG URL, 3.5: a host that ends in a number is an IPv4 address. Parsers read unusual notations (0x7f.1,
    # 2130706433, 0177.0.0.1) as different addresses, so only the standard one is accepted.
    try:
        address = IPv4Address(host)
    except ValueError:
        raise EgressRefused("an IPv4 address must be written as four decimal numbers") from None
    return str(address), address


def no_address(target: Target) -> EgressRefused:
    """Return the error that refuses a host because of its addresses.

    The error is the same for a name that does not exist, so callers cannot find out which names exist in the
    deployment's network.
    """
    if target.address is not None:
        problem = f"{target.authority} is not an allowed address"
    else:
        problem = f"{target.authority} has no allowed address"
    allowing = f'{{"*": {{"private": ["{target.authority}"]}}}}'
    return EgressRefused(f"{problem}; to allow it, add {allowing} to PAWL_EGRESS_FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPattern:
    """`example.com` or `*.example.com` (subdomains only), optionally with a port."""

    name: str
    is_below: bool = False
    # None means 80 and 443.
    port: int | None = None

    def matches(self, target: Target) -> bool:
        if target.port not in (PORTS.values() if self.port is None else (self.port,)):
            return False
        return target.host.endswith(f".{self.name}") if self.is_below else target.host == self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """An allowed private target: a network on ports 80 and 443, or a host on one port."""

    network: Network | None = None
    host: str = ""
    port: int | None = None

    def admits(self, target: Target, address: Address) -> bool:
        if self.port is not None and target.port != self.port:
            return False
        if self.network is None:
            return target.host == self.host
        in_network = address.version == self.network.version and address in self.network
        return in_network and (self.port is not None or target.port in PORTS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRules:
    """Rules that determine what a store may reach. The default is the public internet on ports 80 and 443."""

    # If set, only these hosts are allowed.
    hosts: tuple[HostPattern, ...] | None = None
    openings: tuple[Opening, ...] = ()

    def check_target(self, target: Target) -> None:
        """Check a request's host and port. The host is not resolved, so its addresses are not checked.

        Raises:
            EgressRefused: The rules do not allow the host or the port.
        """
        is_opened = self._opens(target)
        is_listed = any(pattern.matches(target) for pattern in self.hosts or ())
        if self.hosts is not None and not is_listed and not is_opened:
            raise EgressRefused(f"{target.authority} is not among the allowed hosts")
        may_have_port = (
            is_listed or is_opened or target.port in PORTS.values() or any(o.port == target.port for o in self.openings)
        )
        if not may_have_port:
            raise EgressRefused(f"egress to port {target.port} of {target.host} is not allowed")
        if target.address is not None:
            self.check_addresses(target, [target.address])

    def check_secrets(self, target: Target) -> None:
        """Check that secrets may be sent to a target: over https, or to an explicitly allowed host.

        Raises:
            EgressRefused: Secrets may not be sent to the target.
        """
        if target.scheme != "https" and not self._opens(target):
            raise EgressRefused(f"secrets are not sent to {target.authority} over unencrypted http")

    def check_named(self, target: Target) -> None:
        """Check that the deployment explicitly allows the target, by host and port.

        Raises:
            EgressRefused: The deployment does not explicitly allow the target. Default access to the internet does not
                count.
        """
        if not any(pattern.matches(target) for pattern in self.hosts or ()) and not self._opens(target):
            raise EgressRefused(f"{target.authority} is not listed in PAWL_EGRESS_FILE")

    def _opens(self, target: Target) -> bool:
        """Return whether the deployment explicitly allows this target.

        A host name inside an allowed network does not count.
        """
        if any(opening.host == target.host and opening.port == target.port for opening in self.openings):
            return True
        address = target.address
        return address is not None and any(opening.admits(target, address) for opening in self.openings)

    def check_addresses(self, target: Target, addresses: Sequence[Address]) -> None:
        """Check that a target has at least one address and that all its addresses may be reached.

        A single forbidden address is enough for a refusal. A name with both public and private addresses is an attack
        or a mistake, and a client could connect to either.

        Raises:
            EgressRefused: An address is not allowed, or the target has no address.
        """
        has_usual_port = target.port in PORTS.values() or any(pattern.matches(target) for pattern in self.hosts or ())
        for address in addresses:
            reach = reach_of(address)
            if reach is Reach.PUBLIC and has_usual_port:
                continue
            if reach is not Reach.NEVER and any(opening.admits(target, address) for opening in self.openings):
                continue
            raise no_address(target)
        if not addresses:
            raise no_address(target)


def read_rules(hosts: Iterable[str] | None, private: Iterable[str]) -> EgressRules:
    """Parse a deployment's rules.

    Raises:
        ValueError: An entry is invalid. The message names it and the problem.
    """
    return EgressRules(
        hosts=None if hosts is None else tuple(map(_read_pattern, hosts)),
        openings=tuple(map(_read_opening, private)),
    )


def _read_pattern(text: str) -> HostPattern:
    try:
        host, address, port = _read_authority(text.removeprefix("*."))
    except EgressRefused as error:
        raise ValueError(
            f"hosts: {text!r} must look like example.com, *.example.com or example.com:8443: {error}"
        ) from None
    is_below = text.startswith("*.")
    if is_below and address is not None:
        raise ValueError(f"hosts: {text!r}: an address has no subdomains")
    return HostPattern(name=host, is_below=is_below, port=port)


def _read_opening(text: str) -> Opening:
    if "/" in text:
        try:
            network = ip_network(text)
        except ValueError as error:
            raise ValueError(f"private: {text!r} is not a network: {error}") from None
        if not can_be_opened(network):
            raise ValueError(f"private: {text!r} is not inside a private network that can be allowed")
        return Opening(network=network)
    try:
        host, address, port = _read_authority(text)
    except EgressRefused as error:
        raise ValueError(f"private: {text!r} must look like 10.1.2.3:8080 or 10.0.0.0/8: {error}") from None
    if port is None:
        raise ValueError(f"private: {text!r} must have a port")
    if address is None:
        return Opening(host=host, port=port)
    if not can_be_opened(ip_network(address)):
        raise ValueError(f"private: {text!r} is not a private address that can be allowed")
    return Opening(network=ip_network(address), port=port)


def rules_of(rules: Mapping[str, EgressRules], store_id: StoreId) -> EgressRules:
    """Return a store's own rules or, if it has none, the rules for `*` or, failing that, the defaults."""
    return rules.get(store_id) or rules.get("*") or EgressRules()
