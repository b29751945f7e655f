"""API keys: creating and revoking them, and synchronising them with the services."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import IdSource, KeyId, UserId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidField, KeyNotFound
from pawl.job_store.keys import rules as keys
from pawl.job_store.keys.rules import Key, KeyEventKind, event_of
from pawl.job_store.keys.store import PostgresKeyRepository
from pawl.server.identity.key_rows import SECRET_BYTES, USES_MAX, KeyChanges, digest_of, secret_of

# Maximum number of keys that one sync returns.
CHANGES_MAX: Final = 1000

_log = logs.get_logger(__name__)


class KeysExist(Exception):
    def __init__(self) -> None:
        super().__init__("The deployment already has a key: create other keys with it, or revoke it first.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeKey:
    """A created key with its secret. If an earlier attempt at the same request created the key, the secret is empty."""

    key: Key
    secret: str


class Keys:
    def __init__(self, repository: PostgresKeyRepository, clock: Clock, ids: IdSource) -> None:
        self.repository = repository
        self._clock = clock
        self._ids = ids

    async def create(self, governor: Principal, requested: Key, request_id: str = "") -> MadeKey:
        """Create a key. A request id creates at most one key.

        Raises:
            PermissionDenied: The caller may not create the key.
            InvalidField: The key is invalid, or the store has too many.
            TooLarge: The store has too many ended keys.
            InvalidId: The store or user id is malformed.
            RequestIdReused: The request id created a different key.
        """
        key = keys.new_key(governor, requested, key_id=KeyId(self._ids.new("key")), now=self._now())
        secret = secret_of(secrets.token_bytes(SECRET_BYTES))
        event = event_of(KeyEventKind.KEY_CREATED, key, time=key.create_time, governor=governor)
        digest = digest_of(secret)
        stored = await self.repository.add(
            key, event, digest, keys.check_new, request_id=request_id, request_hash=_hash(key)
        )
        if stored.key_id != key.key_id:
            return MadeKey(key=stored, secret="")
        _log.info(
            "key.created",
            key_id=stored.key_id,
            key_store=stored.store_id,
            key_user=stored.user_id,
            roles=sorted(stored.roles),
            by=stored.create_user_id,
            credential=stored.create_credential_id,
        )
        return MadeKey(key=stored, secret=secret)

    async def bootstrap(self) -> MadeKey:
        """Create the deployment's first key.

        Requires only access to the database.

        Raises:
            KeysExist: The deployment already has a key.
        """
        key = Key(
            key_id=KeyId(self._ids.new("key")),
            name="bootstrap",
            user_id=UserId("deployment"),
            roles=frozenset({Role.DEPLOYMENT}),
            create_time=self._now(),
        )
        secret = secret_of(secrets.token_bytes(SECRET_BYTES))
        event = event_of(KeyEventKind.KEY_BOOTSTRAPPED, key, time=key.create_time)
        stored = await self.repository.add(key, event, digest_of(secret), _check_first)
        _log.info("key.bootstrapped", key_id=stored.key_id)
        return MadeKey(key=stored, secret=secret)

    async def list(
        self, governor: Principal, store_id: str, *, include_ended: bool, before: str, keys_max: int
    ) -> Sequence[Key]:
        """Return the keys of a store that the caller manages, newest first.

        Raises:
            PermissionDenied: The caller does not manage the store's keys.
            InvalidId: The store id is malformed.
        """
        governed = keys.governed_store(governor, store_id)
        return await self.repository.list(
            governed, include_ended=include_ended, before=before, keys_max=keys_max, now=self._now()
        )

    async def revoke(self, governor: Principal, key_id: KeyId) -> Key:
        """Revoke a key permanently.

        This is idempotent.

        Raises:
            KeyNotFound: The caller does not manage such a key.
        """
        key = await self.repository.get(key_id, None if keys.is_deployment(governor) else governor.store_id)
        if key is None:
            raise KeyNotFound
        now = self._now()
        revoked = keys.revoked(governor, key, now=now)
        if revoked is key:
            return key
        event = event_of(KeyEventKind.KEY_REVOKED, key, time=now, governor=governor)
        stored = await self.repository.revoke(revoked, event)
        _log.info("key.revoked", key_id=key_id, by=stored.revoke_user_id, credential=stored.revoke_credential_id)
        return stored

    async def sync_keys(self, after_change: int, used_key_ids: Sequence[str]) -> KeyChanges:
        """Return the keys that changed after change `after_change`, and record which keys were used.

        Raises:
            InvalidField: The request reports too many used keys.
        """
        if len(used_key_ids) > USES_MAX:
            raise InvalidField(
                f"used_key_ids must have at most {USES_MAX} entries, got {len(used_key_ids)}", field="used_key_ids"
            )
        if used_key_ids:
            await self.repository.note_uses(used_key_ids)
        return await self.repository.changes(after_change, keys_max=CHANGES_MAX)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now(), UTC)


def _check_first(_key: Key, live_keys: int, _kept_keys: int) -> None:
    if live_keys:
        raise KeysExist


def _hash(key: Key) -> bytes:
    requested = (key.name, key.store_id, key.user_id, sorted(key.roles), key.decides_for_users, key.expire_time)
    return hashlib.sha256(msgspec.msgpack.encode(requested)).digest()
