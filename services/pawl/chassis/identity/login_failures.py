"""Failed logins: a counter by kind, a log line, and a limit by the minute.

Logins that succeed never come here. The limit bounds what a failed login may cost: a lookup of an unknown
credential, and a log line.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import prometheus_client

from pawl.chassis.identity.auth import bearer_key, check_said_once
from pawl.chassis.ids import KeyId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import Overloaded, Unauthenticated

ENTRIES_MAX: Final = 4096
"""The sources and keys whose failures are counted: the oldest give way."""
LOOKING_MAX: Final = 1000
"""Unknown callers that wait for a lookup at the same time."""

NO_KEY: Final = KeyId("")
_SOURCE_MAX: Final = 30
_KEY_MAX: Final = 5
_WINDOW_SECONDS: Final = 60.0
_NETWORK_BITS: Final = 64
_KEY_CHARACTERS: Final = 8

_log = logs.get_logger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]


class LoginRefused(Exception):
    """The cause of an Unauthenticated, which callers do not see; `key_id` is of a key that has ended."""

    def __init__(self, kind: str, key_id: KeyId = NO_KEY) -> None:
        super().__init__(kind)
        self.kind = kind
        self.key_id = key_id


def kind_of(metadata: Metadata) -> str:
    """Return why the metadata of a refused call name no known caller: absent, repeated, malformed or unknown."""
    texts = {name: value for name, value in metadata if isinstance(value, str)}
    try:
        check_said_once(metadata)
    except Unauthenticated:
        return "repeated"
    try:
        bearer_key(texts)
    except Unauthenticated:
        return "malformed" if "authorization" in texts else "absent"
    return "unknown"


def source_of(peer: str) -> str:
    """Return the address that gRPC names: without its port, and of IPv6 the network that one customer has."""
    kind, _, rest = unquote(peer).partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return kind
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return kind
    if address.version == 4:  # noqa: PLR2004  # of the protocol
        return host
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


class LoginFailures:
    """The failed logins of one server in the current minute, by source and by key."""

    def __init__(self, counter: prometheus_client.Counter, clock: Clock) -> None:
        self._counter = counter
        self._clock = clock
        self._failed = Counter[str]()
        self._began_at = clock.monotonic()
        self._looking: set[object] = set()
        self._untold = 0

    def may_look(self, source: str, authorization: str) -> bool:
        """Return whether a lookup of an unknown credential may cost something."""
        self.report()
        return self._failed[source] < _SOURCE_MAX and self._failed[_short(authorization)] < _KEY_MAX

    def look(self, call: object, source: str, authorization: str) -> bool:
        """Return whether a call may wait for a lookup of its caller; it counts as waiting until `end_look`.

        Raises:
            Overloaded: too many wait for that.
        """
        if not self.may_look(source, authorization):
            return False
        if call not in self._looking and len(self._looking) >= LOOKING_MAX:
            raise Overloaded(f"{LOOKING_MAX} callers are being looked up: try again later")
        self._looking.add(call)
        return True

    def end_look(self, call: object) -> None:
        """Remove a call from those that wait, if it is one."""
        self._looking.discard(call)

    def note(self, source: str, metadata: Metadata, method: str, cause: BaseException | None = None) -> None:
        """Count a login that failed, and log it unless there are too many. The cause is that of its error."""
        self.report()
        kind, key, key_id = kind_of(metadata), "", NO_KEY
        if kind == "unknown":
            key = _short(next(str(value) for name, value in metadata if name == "authorization"))
            if isinstance(cause, LoginRefused):
                kind, key_id = cause.kind, cause.key_id
        self._counter.labels(kind).inc()
        # One program with an old key, which tries again and again, holds up nothing else from its address.
        if (not key or self._spend(key, _KEY_MAX)) and self._spend(source, _SOURCE_MAX):
            known = {"key_id": key_id} if key_id else {}
            _log.warning("login.failed", kind=kind, source=source, key=key, method=method, **known)
        else:
            self._untold += 1

    def may_tell(self, source: str) -> bool:
        """Return whether the log may have one more line of a caller who could not be checked."""
        self.report()
        return self._spend(f"unchecked {source}", _SOURCE_MAX)

    def report(self) -> None:
        """Once a minute, log how many failures had no line of their own, and count anew."""
        if self._clock.monotonic() - self._began_at < _WINDOW_SECONDS:
            return
        if self._untold:
            _log.warning("login.failures_throttled", count=self._untold)
        self._failed.clear()
        self._began_at, self._untold = self._clock.monotonic(), 0

    def _spend(self, name: str, most: int) -> bool:
        """Count one failure; returns whether it is within the limit."""
        if self._failed[name] >= most:
            return False
        self._failed[name] += 1
        if len(self._failed) > ENTRIES_MAX:
            del self._failed[next(iter(self._failed))]
        return True


def _short(authorization: str) -> str:
    """Return so much of a digest that one key is told from another, and nothing is learnt about it."""
    return hashlib.sha256(authorization.encode()).hexdigest()[:_KEY_CHARACTERS]
