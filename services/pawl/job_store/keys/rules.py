"""API keys, and the rules for who may manage them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL, NO_KEY, Principal
from pawl.chassis.identity.roles import OWN_ROLES_GO_BESIDE, Role, rights
from pawl.chassis.ids import KeyId, StoreId, UserId, check_id, is_id
from pawl.errors import InvalidField, KeyNotFound, PermissionDenied, TooLarge

# Maximum number of keys of a store that are neither revoked nor expired.
KEYS_MAX: Final = 1000
# Maximum number of keys per store, including ended ones that are still kept.
KEPT_KEYS_MAX: Final = 10_000
# Fraction of both limits that is reserved for the deployment.
RESERVED: Final = 0.1
# Maximum number of users in the chain of keys that created a key.
MAKERS_MAX: Final = 7
NAME_LENGTH_MAX: Final = 200
ROLES_MAX: Final = 32
# The store of keys that belong to the deployment.
DEPLOYMENT_STORE: Final = StoreId("")

_ANYBODY_GIVES: Final = frozenset[str]({Role.VIEWER, Role.MEMBER})
_DECIDERS: Final = frozenset[str]({Role.APPROVER, Role.ADMIN})
_TIME_MAX: Final = datetime(9999, 1, 1, tzinfo=UTC)


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key without its secret.

    A key without roles may decide on its own calls.

    A key can create further keys, which form a chain. `maker_user_ids` lists the users who created this key or an
    earlier key in its chain, each of whom may know a secret in the chain. Keys created by the deployment or the local
    key start a new chain.
    """

    key_id: KeyId = KeyId("")
    name: str = ""
    store_id: StoreId = DEPLOYMENT_STORE
    user_id: UserId
    roles: frozenset[str] = frozenset()
    decides_for_users: bool = False
    expire_time: datetime | None = None
    create_time: datetime
    create_user_id: str = ""
    create_credential_id: str = ""
    maker_user_ids: frozenset[UserId] = frozenset()
    revoke_time: datetime | None = None
    revoke_user_id: str = ""
    revoke_credential_id: str = ""
    last_use_time: datetime | None = None


def is_deployment(governor: Principal) -> bool:
    """Return whether the caller is the deployment, which manages the keys of all stores."""
    return Role.DEPLOYMENT in governor.roles


def makers(governor: Principal) -> frozenset[UserId]:
    """Return the `maker_user_ids` of keys that the caller creates, or an empty set if they start a new chain."""
    if is_deployment(governor) or governor.credential_id == LOCAL_CREDENTIAL:
        return frozenset()
    return governor.people | {governor.user_id}


def governed_store(governor: Principal, named: str) -> StoreId:
    """Return the store whose keys are requested, by default the caller's store.

    Raises:
        PermissionDenied: The caller does not manage the store's keys.
        InvalidId: The store id is malformed.
    """
    if not named:
        return governor.store_id
    store_id = check_id(named, "store_id")
    if store_id != governor.store_id and not is_deployment(governor):
        raise PermissionDenied("a store's keys can be managed only by its operators or with a deployment key")
    return store_id


def new_key(governor: Principal, requested: Key, *, key_id: KeyId, now: datetime) -> Key:
    """Return the key that a caller requests to create.

    The caller must also run `check_new`.

    Raises:
        PermissionDenied: The caller may not create the key.
        InvalidField: The key is invalid.
        InvalidId: The store or user id is malformed.
    """
    store_id = governed_store(governor, requested.store_id)
    _check_meaning(requested, store_id)
    _check_may_give(governor, requested.roles)
    if len(makers(governor)) > MAKERS_MAX:
        message = (
            f"a chain of keys can have at most {MAKERS_MAX} users: create the key with an earlier key of the chain"
        )
        raise InvalidField(message, field="key")
    return Key(
        key_id=key_id,
        name=requested.name,
        store_id=store_id,
        user_id=requested.user_id,
        roles=requested.roles,
        decides_for_users=requested.decides_for_users,
        expire_time=requested.expire_time,
        create_time=now,
        create_user_id=governor.user_id,
        create_credential_id=governor.credential_id,
        maker_user_ids=makers(governor),
    )


def check_new(key: Key, live_keys: int, kept_keys: int) -> None:
    """Check that a store with these numbers of live and retained keys may have another key.

    Raises:
        InvalidField: The store has too many live keys, or the new key has already expired.
        TooLarge: The store has too many ended keys.
    """
    if key.expire_time is not None and key.expire_time <= key.create_time:
        raise InvalidField("expire_time must be in the future", field="key.expire_time")
    # Only keys that the deployment or the local key created have no recorded creators. These keys can use the reserve.
    live_max, kept_max = (
        round(most * (1 - RESERVED)) if key.maker_user_ids else most for most in (KEYS_MAX, KEPT_KEYS_MAX)
    )
    if live_keys >= live_max:
        raise InvalidField(
            f"the store already has {live_max} keys, which is the maximum: revoke one first", field="key"
        )
    if kept_keys >= kept_max:
        raise TooLarge(
            f"the store already has {kept_max} keys, including keys that ended within the last 90 days: create "
            "fewer keys with a longer validity, or use tokens of an identity provider for short-lived callers"
        )


def revoked(governor: Principal, key: Key, *, now: datetime) -> Key:
    """Return the key after the caller has revoked it. A key that was already revoked does not change.

    Raises:
        KeyNotFound: The caller does not manage such a key.
    """
    if key.store_id != governor.store_id and not is_deployment(governor):
        raise KeyNotFound
    if key.revoke_time is not None:
        return key
    return replace(key, revoke_time=now, revoke_user_id=governor.user_id, revoke_credential_id=governor.credential_id)


def _check_meaning(requested: Key, store_id: StoreId) -> None:
    check_id(requested.user_id, "user_id")
    if len(requested.name) > NAME_LENGTH_MAX or not requested.name.isprintable():
        raise InvalidField(f"name must be at most {NAME_LENGTH_MAX} printable characters", field="key.name")
    if len(requested.roles) > ROLES_MAX or not all(map(is_id, requested.roles)):
        raise InvalidField(
            f"roles must have at most {ROLES_MAX} entries, each with 1 to 64 letters, digits, _ and -",
            field="key.roles",
        )
    if not rights(requested.roles):
        raise InvalidField(f"roles: {OWN_ROLES_GO_BESIDE}", field="key.roles")
    if Role.DEPLOYMENT in requested.roles and len(requested.roles) > 1:
        raise InvalidField("the deployment role cannot be combined with other roles", field="key.roles")
    if (Role.DEPLOYMENT in requested.roles) != (store_id == DEPLOYMENT_STORE):
        wrong = (
            "deployment keys have no store: create them with a deployment key, and the first with `pawl keys bootstrap`"
            if Role.DEPLOYMENT in requested.roles
            else "store_id is required: specify the key's store, as in `pawl keys create --store STORE`"
        )
        raise InvalidField(wrong, field="key.store_id")
    if requested.decides_for_users and Role.DELEGATE not in requested.roles:
        raise InvalidField("decides_for_users requires the delegate role", field="key.decides_for_users")
    if requested.expire_time is not None and requested.expire_time >= _TIME_MAX:
        raise InvalidField(f"expire_time must be before the year {_TIME_MAX.year}", field="key.expire_time")


def _check_may_give(governor: Principal, roles: AbstractSet[str]) -> None:
    if is_deployment(governor):
        return
    if not roles and not governor.roles & _DECIDERS:
        raise PermissionDenied("a key without roles may decide on its own calls: give it a role, such as member")
    if beyond := sorted(roles - governor.roles - _ANYBODY_GIVES):
        raise PermissionDenied(
            f"you cannot create a key with roles that you do not have: {', '.join(beyond):.200}. Use a deployment key"
        )


class KeyEventKind(StrEnum):
    KEY_CREATED = "KEY_CREATED"
    KEY_REVOKED = "KEY_REVOKED"
    KEY_BOOTSTRAPPED = "KEY_BOOTSTRAPPED"


class KeyEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event about a key, with the key's fields at that time. The store assigns `event_id`."""

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
    """Return the event for an action on `key`. If `governor` is None, the action was taken directly in the database."""
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
    """Return the store whose events are requested.

    By default, this is the caller's store. For the deployment, the default is None, which means all stores.

    Raises:
        PermissionDenied: The caller does not manage the store's keys.
        InvalidId: The store id is malformed.
    """
    return None if is_deployment(governor) and not named else governed_store(governor, named)
