"""API keys from job-store: the format of their secrets, and each process's snapshot of them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec

from pawl.chassis.identity.auth import Credential
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable, PawlError

SECRET_BYTES: Final = 32
# Maximum number of used keys that one sync reports.
USES_MAX: Final = 1000

# Maximum number of expired or revoked keys to remember for the audit. The oldest are dropped first.
ENDED_MAX: Final = 10_000

_SYNC_SECONDS: Final = 2.0
_SYNC_INTERVAL_SECONDS_MIN: Final = 0.5
_STALE_SECONDS: Final = 60.0
_USE_SECONDS: Final = 60.0
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CHECKSUM_LENGTH: Final = 6
_SECRET: Final = re.compile(r"pawl_[A-Za-z0-9_-]{43}[A-Za-z0-9]{6}", re.ASCII)

_log = logs.get_logger(__name__)


def digest_of(key: str) -> bytes:
    """Return the SHA-256 under which a key is stored. No salt is needed, because keys are random."""
    return hashlib.sha256(key.encode()).digest()


def secret_of(random: bytes) -> str:
    """Return the secret for 32 random bytes: `pawl_`, 43 characters of base64url, and a checksum of 6 characters.

    The format helps secret scanners find leaked keys, and malformed keys can be refused without a lookup.
    """
    if len(random) != SECRET_BYTES:
        raise ValueError(f"a secret is made from {SECRET_BYTES} random bytes, got {len(random)}")
    text = f"pawl_{base64.urlsafe_b64encode(random).decode().rstrip('=')}"
    return text + _checksum(text)


def is_secret(text: str) -> bool:
    """Return whether a string has the format of a secret, including the checksum."""
    return _SECRET.fullmatch(text) is not None and _checksum(text[:-_CHECKSUM_LENGTH]) == text[-_CHECKSUM_LENGTH:]


def _checksum(text: str) -> str:
    number, digits = zlib.crc32(text.encode()), ""
    for _ in range(_CHECKSUM_LENGTH):
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits


class KeyGrant(Credential, frozen=True, kw_only=True):
    digest: bytes
    is_revoked: bool


class KeyChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Changed keys in the order of their last change, and the position of the last one."""

    keys: Sequence[KeyGrant]
    last_change: int
    has_more: bool


class KeySource(Protocol):
    async def sync_keys(self, after_change: int, used_key_ids: Sequence[str]) -> KeyChanges:
        """Return the keys that changed after `after_change` (0 returns all), and record which keys were used.

        A `last_change` smaller than `after_change` means that the database is an older copy.

        Raises:
            PawlError: The keys cannot be read right now.
        """


class KeyRows:
    """A snapshot of the keys, updated every 2 s by `run`.

    Before an unknown key is refused, the snapshot is updated, so that a new key works immediately everywhere.
    Concurrent callers share one update, and updates are at least half a second apart. If no update succeeds for 60 s,
    all keys are refused, because any of them may have been revoked.
    """

    def __init__(self, source: KeySource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._by_digest: dict[bytes, KeyGrant] = {}
        self._ended: dict[bytes, KeyGrant] = {}
        self._last_change = 0
        self._started_at = float("-inf")
        self._fresh_at = float("-inf")
        self._is_failing = False
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[bool] | None = None
        self._used: set[str] = set()
        self._reported: dict[str, float] = {}

    async def run(self) -> None:
        while True:
            async with self._lock:
                await self._sync()
            await self._clock.sleep(_SYNC_SECONDS)

    async def find(self, secret: str, *, may_look_up: Callable[[], bool] = lambda: True) -> KeyGrant | None:
        """Return the valid key with that secret, or None if there is none. This counts as a use of the key.

        `may_look_up` is called before an update for an unknown key.

        Raises:
            DependencyUnavailable: The key cannot be checked right now.
        """
        if not is_secret(secret):
            return None
        digest = digest_of(secret)
        found = self._in_force(self._known(digest))
        if found is None or self.is_stale:
            if (may_look_up() and not await self._sync_now()) or self.is_stale:
                raise DependencyUnavailable("keys cannot be checked right now: try again later")
            found = self._in_force(self._known(digest))
        if found is not None:
            self._used.add(found.credential_id)
        return found

    def ended(self, digest: bytes) -> KeyGrant | None:
        """Return the expired or revoked key with that digest, for the audit log.

        Return None if no such key is known.
        """
        found = self._known(digest)
        return None if self._in_force(found) else found

    def in_force(self, key_id: str) -> KeyGrant | None:
        found = next((grant for grant in self._by_digest.values() if grant.credential_id == key_id), None)
        return self._in_force(found)

    @property
    def age_seconds(self) -> float:
        """The age of the snapshot in seconds. Infinite before the first update."""
        return self._clock.monotonic() - self._fresh_at

    @property
    def is_stale(self) -> bool:
        """True if the snapshot is too old to accept any key."""
        return self.age_seconds >= _STALE_SECONDS

    def _known(self, digest: bytes) -> KeyGrant | None:
        # A wrong clock may have caused a key to be counted as ended too early.
        return self._by_digest.get(digest) or self._ended.get(digest)

    def _in_force(self, grant: KeyGrant | None) -> KeyGrant | None:
        if grant is None or grant.is_revoked:
            return None
        return None if grant.expire_time is not None and grant.expire_time <= self._clock.now() else grant

    async def _sync_now(self) -> bool:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._sync_next(), name="keys.sync")
        return await tasks.shield(self._next)

    async def _sync_next(self) -> bool:
        try:
            wait_seconds = self._started_at + _SYNC_INTERVAL_SECONDS_MIN - self._clock.monotonic()
            if wait_seconds > 0:
                await self._clock.sleep(wait_seconds)
            await self._lock.acquire()
        finally:
            # Later callers may need a key that is newer than this update, so they start another one.
            self._next = None
        try:
            return await self._sync()
        finally:
            self._lock.release()

    async def _sync(self) -> bool:
        started_at = self._started_at = self._clock.monotonic()
        # After a long outage, this may be a different database, for example an older copy.
        is_full = self.is_stale
        used = self._uses_to_report(started_at)
        after_change = 0 if is_full else self._last_change
        try:
            await self._read(after_change, used)
        except PawlError as error:
            if not self._is_failing:
                _log.warning("keys.sync_failed", reason=error.message)
            self._is_failing = True
            return False
        if self._is_failing:
            _log.info("keys.sync_recovered")
        self._is_failing = False
        self._fresh_at = started_at
        self._used.difference_update(used)
        self._reported.update(dict.fromkeys(used, started_at))
        return True

    async def _read(self, after_change: int, used: Sequence[str]) -> None:
        """Update the snapshot once all pages of changes have been read."""
        is_full = after_change == 0
        found: list[KeyGrant] = []
        has_more = True
        while has_more:
            changes = await self._source.sync_keys(after_change, used)
            used = ()
            if changes.last_change < after_change:
                after_change, is_full, found = 0, True, []
            else:
                found += changes.keys
                after_change, has_more = changes.last_change, changes.has_more
        if is_full:
            self._by_digest, self._ended = {}, {}
        if found or is_full:
            self._apply(found)
        self._last_change = after_change

    def _apply(self, changed: Iterable[KeyGrant]) -> None:
        self._by_digest |= {grant.digest: grant for grant in changed}
        known = self._by_digest.values()
        for grant in [grant for grant in known if self._in_force(grant) is None]:
            self._ended[grant.digest] = self._by_digest.pop(grant.digest)
            self._used.discard(grant.credential_id)
            self._reported.pop(grant.credential_id, None)
        while len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _uses_to_report(self, now: float) -> list[str]:
        due = (key_id for key_id in self._used if now - self._reported.get(key_id, float("-inf")) >= _USE_SECONDS)
        return [key_id for key_id, _ in zip(due, range(USES_MAX), strict=False)]
