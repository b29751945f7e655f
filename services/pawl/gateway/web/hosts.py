"""Checks a request's host, origin and headers before the request is read.

Browsers send the session cookie with every request to the gateway, whichever page makes the request. A request with a
cookie must therefore come from one of the gateway's pages. A request with a key may come from anywhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from pawl.errors import ForeignHost, ForeignOrigin, InvalidField, PawlError

JSON: Final = "application/json"
_OWN: Final = frozenset({"same-origin", "none"})
_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::[0-9]{0,5})?")
_CALLER_HEADERS: Final = ("authorization", "pawl-store", "pawl-user")
# Headers that authenticate or frame a request. If one is repeated, components could each read a different copy.
_ONCE: Final = frozenset(
    {
        "authorization",
        "content-length",
        "content-type",
        "host",
        "webhook-id",
        "webhook-signature",
        "webhook-timestamp",
    }
)


def check_host(host: str, allowed: Collection[str]) -> None:
    """Check that the `Host` header is allowed. Loopback is always allowed.

    This protects against DNS rebinding, because a page whose hostname resolves to this machine sends its own hostname.

    Raises:
        ForeignHost: The host is not allowed.
    """
    if host_name(host) in allowed or host.lower() in allowed or is_loopback(host):
        return
    raise ForeignHost("This gateway does not accept this host. Add it to PAWL_GATEWAY_HOSTS to allow it.")


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by lower-case name. A repeated header becomes one list (RFC 9110, 5.3).

    Proxies append to headers such as `x-forwarded-for` and `via` by repeating them.

    Raises:
        InvalidField: A header that must not be repeated is repeated.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in _ONCE:
            raise InvalidField(f"The header {name} must not be repeated.", field="headers")
        else:
            # Cookies are joined with a semicolon (RFC 9113, 8.2.3).
            found[name] += f"{'; ' if name == 'cookie' else ', '}{value}"
    return found


def check_frame(headers: Mapping[str, str]) -> None:
    """Check that a request does not specify its length twice, which would allow request smuggling (RFC 9112, 6.1).

    Raises:
        InvalidField: The request has both Transfer-Encoding and Content-Length.
    """
    if "transfer-encoding" in headers and "content-length" in headers:
        raise InvalidField("Send either Content-Length or Transfer-Encoding, not both.", field="headers")


def check_caller(names: Iterable[str]) -> None:
    """Check that credential headers are not repeated.

    Raises:
        InvalidField: A header is repeated. A proxy may have added its own copy.
    """
    all_names = list(names)
    for name in _CALLER_HEADERS:
        if all_names.count(name) > 1:
            raise InvalidField(f"The header {name} must not be repeated.", field="headers")


def check_page(method: str, headers: Mapping[str, str]) -> None:
    """Check that a request with a cookie comes from one of the gateway's pages.

    Raises:
        ForeignOrigin: The request may come from another page.
    """
    fault = "Pages from other origins cannot use this session."
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        scheme, _, host = origin.partition("://")
        # A proxy may terminate TLS, so the scheme is not compared.
        if scheme not in {"http", "https"} or host.lower() != headers.get("host", "").lower():
            raise ForeignOrigin(fault)
    elif site is None and method != "GET":
        raise ForeignOrigin(f"{fault} Programs must send Authorization: Bearer KEY.")
    if site is not None and site not in _OWN:
        raise ForeignOrigin(fault)


def check_json(content_type: str | None) -> None:
    """Check for the JSON content type, which forms on other pages cannot send.

    Raises:
        InvalidField: The request has another content type.
    """
    if (content_type or "").partition(";")[0].strip().lower() != JSON:
        raise InvalidField(f"The body must be JSON: send Content-Type: {JSON}.", field="content-type")


def bearer(authorization: str | None) -> str | None:
    """Return the key from an `Authorization` header, or None if there is no header.

    Raises:
        InvalidField: The header has another scheme or does not contain a key.
    """
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not (key := key.strip()):
        raise InvalidField("The header must be Authorization: Bearer KEY.", field="authorization")
    return key


def is_loopback(host: str) -> bool:
    """Return whether a `Host` header refers to this machine."""
    name = host_name(host)
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return a `Host` header's host in lower case, without the port, or an empty string if the header is invalid."""
    found = _HOST.fullmatch(host.lower())
    return (found["six"] or found["name"]).rstrip(".") if found else ""


# The HTTP status for each kind of error, as in the Connect protocol.
HTTP_STATUS: Final[Mapping[str, int]] = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "UNIMPLEMENTED": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 400,
    "OUT_OF_RANGE": 400,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 499,
    "INTERNAL": 500,
}
_STATUS_OF_REASON: Final[Mapping[str, int]] = {"TOO_LARGE": 413, "FOREIGN_HOST": 421}


def http_status(error: PawlError) -> int:
    return _STATUS_OF_REASON.get(error.reason, HTTP_STATUS[error.kind])
