"""Failed logins: a counter by kind, a log line, and a rate limit.

Logins that succeed never come here. The limit bounds what a failed login may cost: a look-up of an unknown
credential, and a log line.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import unquote

from prometheus_client import Counter

from pawl.chassis import logs
from pawl.chassis.auth import bearer_key, check_said_once
from pawl.chassis.clock import Clock
from pawl.chassis.ids import KeyId
from pawl.errors import Overloaded, Unauthenticated

ENTRIES_MAX: Final = 4096
"""The sources that are remembered, and the keys: the least recent give way."""

LOOKING_MAX: Final = 1000
"""The callers at once, of whom nothing is known yet, that wait until others were asked about them."""

NO_KEY: Final = KeyId("")
_OF_SOURCE: Final = (30.0, 0.5)
_OF_KEY: Final = (5.0, 0.1)
_REPORT_SECONDS: Final = 60.0
_NETWORK_BITS: Final = 64
_KEY_CHARACTERS: Final = 8

_log = logs.get_logger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]


class FailureKind(StrEnum):
    """The kinds of failed logins."""

    ABSENT = "absent"
    REPEATED = "repeated"
    MALFORMED = "malformed"
    UNKNOWN = "unknown"
    EXPIRED = "expired"
    REVOKED = "revoked"
    TOKEN = "token"  # noqa: S105  # a kind of credential, and none itself
    CERTIFICATE = "certificate"


class LoginRefused(Exception):
    """The cause of an Unauthenticated that callers are not told; `key_id` is of a key that has ended."""

    def __init__(self, kind: FailureKind, key_id: KeyId = NO_KEY) -> None:
        super().__init__(kind.value)
        self.kind = kind
        self.key_id = key_id


def kind_of(metadata: Metadata) -> FailureKind:
    """Return why the metadata of a call, which was refused, say nobody whom we know."""
    texts = {name: value for name, value in metadata if isinstance(value, str)}
    try:
        check_said_once(metadata)
    except Unauthenticated:
        return FailureKind.REPEATED
    try:
        bearer_key(texts)
    except Unauthenticated:
        return FailureKind.MALFORMED if "authorization" in texts else FailureKind.ABSENT
    return FailureKind.UNKNOWN


def source_of(peer: str) -> str:
    """Return whose address gRPC names: without its port, and of IPv6 the network that one customer has."""
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


@dataclass(slots=True)
class _Left:
    failures: float
    at: float


class Rate:
    """A token bucket for each of the most recent names: `burst` at once, then so many a second."""

    def __init__(self, burst: float, per_second: float, clock: Clock) -> None:
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        self._names: OrderedDict[str, _Left] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def has(self, name: str) -> bool:
        """Return whether one more is within the rate."""
        return self._now(name).failures >= 1

    def spend(self, name: str) -> bool:
        """Take one; returns whether it is within the rate."""
        left = self._now(name)
        is_within = left.failures >= 1
        if is_within:
            left.failures -= 1
        self._names[name] = left
        self._names.move_to_end(name)
        if len(self) > ENTRIES_MAX:
            self._names.popitem(last=False)
        return is_within

    def _now(self, name: str) -> _Left:
        now = self._clock.monotonic()
        left = self._names.get(name) or _Left(self._burst, now)
        left.failures = min(self._burst, left.failures + (now - left.at) * self._per_second)
        left.at = now
        return left


class LoginFailures:
    """The failed logins of one server."""

    def __init__(self, counter: Counter, clock: Clock) -> None:
        self._counter = counter
        self._clock = clock
        self._sources = Rate(*_OF_SOURCE, clock)
        self._keys = Rate(*_OF_KEY, clock)
        self._unchecked = Rate(*_OF_SOURCE, clock)
        self._looking: set[object] = set()
        self._unsaid = 0
        self._unsaid_source = ""
        self._unsaid_since = 0.0

    def may_look(self, source: str, authorization: str) -> bool:
        """Return whether a look for a credential that is not known may cost something."""
        return self._sources.has(source) and self._keys.has(_short(authorization))

    def look(self, call: object, source: str, authorization: str) -> bool:
        """Return whether a call may wait until others were asked who calls; it counts as waiting until `end_look`.

        Raises:
            Overloaded: too many wait for that.
        """
        if not self.may_look(source, authorization):
            return False
        if call not in self._looking and len(self._looking) >= LOOKING_MAX:
            raise Overloaded(f"{LOOKING_MAX} callers are being looked for: try again later")
        self._looking.add(call)
        return True

    def end_look(self, call: object) -> None:
        """Count a call no more among those that wait, if it is one."""
        self._looking.discard(call)

    def note(self, source: str, metadata: Metadata, method: str, cause: BaseException | None = None) -> None:
        """Count a login that failed, and tell of it unless there are too many. The cause is that of its error."""
        kind, key, key_id = kind_of(metadata), "", NO_KEY
        if kind is FailureKind.UNKNOWN:
            key = _short(next(str(value) for name, value in metadata if name == "authorization"))
            if isinstance(cause, LoginRefused):
                kind, key_id = cause.kind, cause.key_id
        self._counter.labels(kind.value).inc()
        # One program with an old key, which tries again and again, holds up nothing else from its address.
        if (not key or self._keys.spend(key)) and self._sources.spend(source):
            known = {"key_id": key_id} if key_id else {}
            _log.warning("login.failed", kind=kind.value, source=source, key=key, method=method, **known)
            return
        if not self._unsaid:
            self._unsaid_since = self._clock.monotonic()
        self._unsaid += 1
        self._unsaid_source = source
        self.report()

    def may_tell(self, source: str) -> bool:
        """Return whether the log may have one more line of a caller who could not be checked."""
        return self._unchecked.spend(source)

    def report(self) -> None:
        """Tell, once a minute, how many failures were told by no line of their own."""
        if self._unsaid and self._clock.monotonic() - self._unsaid_since >= _REPORT_SECONDS:
            _log.warning("login.failures_throttled", count=self._unsaid, last_source=self._unsaid_source)
            self._unsaid = 0


def _short(authorization: str) -> str:
    """Return so much of a digest that one key is told from another, and nothing is learnt about it."""
    return hashlib.sha256(authorization.encode()).hexdigest()[:_KEY_CHARACTERS]
