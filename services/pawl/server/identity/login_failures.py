"""Counts, limits and logs failed logins, per minute.

The limits bound the cost of failed logins: lookups of unknown credentials, and log lines. Successful logins are not
counted.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

import prometheus_client

from pawl.chassis.identity.auth import NO_KEY, LoginRefused, bearer_key, check_not_repeated
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import Overloaded, Unauthenticated

# Maximum number of sources and keys with failure counts. The oldest are dropped first.
ENTRIES_MAX: Final = 4096
# Concurrent lookups of unknown callers.
LOOKUPS_MAX: Final = 1000

_SOURCE_MAX: Final = 30
_KEY_MAX: Final = 5
_WINDOW_SECONDS: Final = 60.0
_NETWORK_BITS: Final = 64
_KEY_CHARACTERS: Final = 8

_log = logs.get_logger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]


def kind_of(metadata: Metadata) -> str:
    """Return why a refused call's metadata does not identify a caller: absent, repeated, malformed or unknown."""
    texts = {name: value for name, value in metadata if isinstance(value, str)}
    try:
        check_not_repeated(metadata)
    except Unauthenticated:
        return "repeated"
    try:
        bearer_key(texts)
    except Unauthenticated:
        return "malformed" if "authorization" in texts else "absent"
    return "unknown"


def source_of(peer: str) -> str:
    """Return the address of a gRPC peer without the port.

    For IPv6, return the /64 network, which usually has one owner.
    """
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
    """One server's failed logins in the current minute, by source and by key."""

    def __init__(self, counter: prometheus_client.Counter, clock: Clock) -> None:
        self._counter = counter
        self._clock = clock
        self._failed = Counter[str]()
        self._started_at = clock.monotonic()
        self._lookups: set[object] = set()
        self._unlogged = 0

    def may_look_up(self, source: str, authorization: str) -> bool:
        self.report()
        return self._failed[source] < _SOURCE_MAX and self._failed[_short(authorization)] < _KEY_MAX

    def start_lookup(self, call: object, source: str, authorization: str) -> bool:
        """Return whether a call may look up its caller. If so, the call counts as waiting until `end_lookup` is called.

        Raises:
            Overloaded: Too many calls are waiting for lookups.
        """
        if not self.may_look_up(source, authorization):
            return False
        if call not in self._lookups and len(self._lookups) >= LOOKUPS_MAX:
            raise Overloaded(f"too many unknown keys are being checked (limit: {LOOKUPS_MAX}): try again later")
        self._lookups.add(call)
        return True

    def end_lookup(self, call: object) -> None:
        """Stop counting a call as waiting. Idempotent."""
        self._lookups.discard(call)

    def note(self, source: str, metadata: Metadata, method: str, cause: BaseException | None = None) -> None:
        """Count a failed login, and log it unless there were too many. `cause` is the cause of the error."""
        self.report()
        kind, key, key_id = kind_of(metadata), "", NO_KEY
        if kind == "unknown":
            key = _short(next(str(value) for name, value in metadata if name == "authorization"))
            if isinstance(cause, LoginRefused):
                kind, key_id = cause.kind, cause.key_id
        self._counter.labels(kind).inc()
        # A program that keeps retrying an old key must not block others at its address.
        if (not key or self._spend(key, _KEY_MAX)) and self._spend(source, _SOURCE_MAX):
            known = {"key_id": key_id} if key_id else {}
            _log.warning("login.failed", kind=kind, source=source, key=key, method=method, **known)
        else:
            self._unlogged += 1

    def may_log(self, source: str) -> bool:
        self.report()
        return self._spend(f"unchecked {source}", _SOURCE_MAX)

    def report(self) -> None:
        """Once a minute has passed, log how many failures were not logged, and reset the counts."""
        if self._clock.monotonic() - self._started_at < _WINDOW_SECONDS:
            return
        if self._unlogged:
            _log.warning("login.failures_throttled", count=self._unlogged)
        self._failed.clear()
        self._started_at, self._unlogged = self._clock.monotonic(), 0

    def _spend(self, name: str, most: int) -> bool:
        if self._failed[name] >= most:
            return False
        self._failed[name] += 1
        if len(self._failed) > ENTRIES_MAX:
            del self._failed[next(iter(self._failed))]
        return True


def _short(authorization: str) -> str:
    """Return a digest that is long enough to distinguish keys, but too short to reveal them."""
    return hashlib.sha256(authorization.encode()).hexdigest()[:_KEY_CHARACTERS]
