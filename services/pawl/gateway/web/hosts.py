"""The checks before anything is read: the host that was asked for, and where a request was made.

A browser sends the cookie of a session with every request to the gateway, whatever page has made it. So a request that
lives on a cookie must say that a page of the gateway made it; one that brings its own key need not.
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
_OF_CALLERS: Final = ("authorization", "pawl-store", "pawl-user")
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
"""Headers by which a webhook is judged and read: of two, another one might read the other."""


def check_host(host: str, allowed: Collection[str]) -> None:
    """Return if the gateway answers to a `Host` header; loopback is always itself.

    A page of another name that leads to this machine (DNS rebinding) comes with its own name.

    Raises:
        ForeignHost: it does not.
    """
    if host_name(host) in allowed or host.lower() in allowed or is_loopback(host):
        return
    raise ForeignHost("This gateway does not answer to that host: add it to PAWL_GATEWAY_HOSTS if it should.")


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by their names, which are in lower case; what came several times is one list (RFC 9110, 5.3).

    Proxies add a header to one of its name that is there, `x-forwarded-for` and `via` for example.

    Raises:
        InvalidField: a header came twice of which there can be one.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        if name not in found:
            found[name] = value
        elif name in _ONCE:
            raise InvalidField(f"The header {name} came twice.", field="headers")
        else:
            # Cookies are a list of their own (RFC 9113, 8.2.3).
            found[name] += f"{'; ' if name == 'cookie' else ', '}{value}"
    return found


def check_frame(headers: Mapping[str, str]) -> None:
    """Return if a request says once how long it is: of two, something in front may read the other (RFC 9112, 6.1).

    Raises:
        InvalidField: it does not.
    """
    if "transfer-encoding" in headers and "content-length" in headers:
        raise InvalidField(
            "The length is said twice: send no Content-Length beside Transfer-Encoding.", field="headers"
        )


def check_caller(names: Iterable[str]) -> None:
    """Return if the names of headers have each of those that say whose a request is at most once.

    Raises:
        InvalidField: one came twice: something in front may have added its own to that of a stranger.
    """
    all_names = list(names)
    for name in _OF_CALLERS:
        if all_names.count(name) > 1:
            raise InvalidField(f"The header {name} came twice.", field="headers")


def check_page(method: str, headers: Mapping[str, str]) -> None:
    """Return if a request that lives on a cookie was made by a page of the gateway.

    Raises:
        ForeignOrigin: another page may have made it.
    """
    fault = "A page of another origin cannot use the session of this one."
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        # Something in front of the gateway may end TLS, and say so or not.
        if scheme not in {"http", "https"} or place.lower() != headers.get("host", "").lower():
            raise ForeignOrigin(fault)
    elif site is None and method != "GET":
        raise ForeignOrigin(f"{fault} Programs bring a key: Authorization: Bearer KEY.")
    if site is not None and site not in _OWN:
        raise ForeignOrigin(fault)


def check_json(content_type: str | None) -> None:
    """Return if the body of a request says that it is JSON, which no form of another page can.

    Raises:
        InvalidField: it does not.
    """
    if (content_type or "").partition(";")[0].strip().lower() != JSON:
        raise InvalidField(f"The body must be JSON: send Content-Type: {JSON}.", field="content-type")


def bearer(authorization: str | None) -> str | None:
    """Return the key of an `Authorization` header; None if there is no header.

    Raises:
        InvalidField: it has another scheme, or no key.
    """
    if authorization is None:
        return None
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not (key := key.strip()):
        raise InvalidField("The header must be Authorization: Bearer KEY.", field="authorization")
    return key


def is_loopback(host: str) -> bool:
    """Return whether a `Host` header names this very machine."""
    name = host_name(host)
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return a `Host` header without its port, in lower case; empty if it is none."""
    found = _HOST.fullmatch(host.lower())
    return (found["six"] or found["name"]).rstrip(".") if found else ""


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
"""The status of each kind of error, as the Connect protocol has them."""
_OF_REASONS: Final[Mapping[str, int]] = {"TOO_LARGE": 413, "FOREIGN_HOST": 421}


def http_status(error: PawlError) -> int:
    """Return the HTTP status of an error."""
    return _OF_REASONS.get(error.reason, HTTP_STATUS[error.kind])
