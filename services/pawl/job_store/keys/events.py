"""Events of API keys: who made and revoked which."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import msgspec

from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.login_failures import NO_KEY
from pawl.chassis.ids import KeyId, StoreId
from pawl.job_store.keys.rules import DEPLOYMENT_STORE, Key, governed_store, is_deployment


class KeyEventKind(StrEnum):
    """The kinds of events."""

    KEY_CREATED = "KEY_CREATED"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_BOOTSTRAPPED = "KEY_BOOTSTRAPPED"


class KeyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a key, as that was then. Its id is given when it is kept."""

    event_id: int = 0
    time: datetime
    kind: KeyEventKind
    store_id: StoreId = DEPLOYMENT_STORE
    key_id: KeyId = NO_KEY
    key_name: str = ""
    user_id: str = ""
    roles: frozenset[str] = frozenset()
    by_store_id: StoreId = DEPLOYMENT_STORE
    by_user_id: str = ""
    by_delegate_user_id: str = ""
    by_credential_id: str = ""


def event_of(kind: KeyEventKind, key: Key, *, time: datetime, governor: Principal | None = None) -> KeyEvent:
    """Return that a governor, None for who has access to the database, did something to a key."""
    event = KeyEvent(
        time=time,
        kind=kind,
        store_id=key.store_id,
        key_id=key.key_id,
        key_name=key.name,
        user_id=key.user_id,
        roles=key.roles,
    )
    if governor is None:
        return event
    return msgspec.structs.replace(
        event,
        by_store_id=governor.store_id,
        by_user_id=governor.user_id,
        by_delegate_user_id=governor.delegate_user_id,
        by_credential_id=governor.credential_id,
    )


def visible_store(governor: Principal, named: str) -> StoreId | None:
    """Return the store whose events are meant, None for all: none named is the governor's own, of the deployment all.

    Raises:
        PermissionDenied: it is another one's.
        InvalidId: it cannot exist.
    """
    return None if is_deployment(governor) and not named else governed_store(governor, named)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key to be kept, and the request that made it; an empty request id is of none. The event goes with it."""

    key: Key
    event: KeyEvent
    digest: bytes
    request_id: str = ""
    request_hash: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """The events that are asked for; what is None or empty means any."""

    store_id: StoreId | None
    key_id: str = ""
    kind: KeyEventKind | None = None
