"""API keys, and the rules of who may govern which."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL, Principal
from pawl.chassis.identity.login_failures import NO_KEY
from pawl.chassis.identity.roles import OWN_ROLES_GO_BESIDE, Role, rights
from pawl.chassis.ids import KeyId, StoreId, UserId, check_id, is_id
from pawl.errors import InvalidField, KeyNotFound, PermissionDenied, TooLarge

KEYS_MAX: Final = 1000
"""Most keys of a store that are neither revoked nor expired."""
KEPT_KEYS_MAX: Final = 10_000
"""Most keys of a store with those that have ended and are still kept."""
RESERVED: Final = 0.1
"""The share of both limits that is reserved for the deployment."""
MAKERS_MAX: Final = 7
"""Most users that a key comes from."""
NAME_LENGTH_MAX: Final = 200
ROLES_MAX: Final = 32
DEPLOYMENT_STORE: Final = StoreId("")
"""The store of keys that belong to no store."""

_ANYBODY_GIVES: Final = frozenset[str]({Role.VIEWER, Role.MEMBER})
_DECIDERS: Final = frozenset[str]({Role.APPROVER, Role.ADMIN})
_TIME_MAX: Final = datetime(9999, 1, 1, tzinfo=UTC)
_EXPIRE_TIME: Final = "expire_time: must be a time in the future"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """An API key, without its secret. Without roles it decides its own calls.

    `maker_user_ids` are the users who made it, and the keys with which it was made: each could have kept a secret
    on the way to it. What a key of the deployment or the local key makes begins anew, without any.
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
    """Return whether a caller is the deployment, which governs the keys of all stores; an operator those of its own."""
    return Role.DEPLOYMENT in governor.roles


def makers(governor: Principal) -> frozenset[UserId]:
    """Return the users from whom the keys come that a caller makes; none for what begins anew."""
    if is_deployment(governor) or governor.credential_id == LOCAL_CREDENTIAL:
        return frozenset()
    return governor.people | {governor.user_id}


def governed_store(governor: Principal, named: str) -> StoreId:
    """Return the store whose keys are meant; none named is the governor's own.

    Raises:
        PermissionDenied: it is another one's.
        InvalidId: it cannot exist.
    """
    if not named:
        return governor.store_id
    store_id = check_id(named, "store_id")
    if store_id != governor.store_id and not is_deployment(governor):
        raise PermissionDenied("keys of another store are governed by its operators and by the deployment")
    return store_id


def new_key(governor: Principal, asked: Key, *, key_id: KeyId, now: datetime) -> Key:
    """Return the key that is made when a governor asks for one, if `check_new` finds nothing against it.

    Raises:
        PermissionDenied: the governor may not make it.
        InvalidField: it has no meaning.
        InvalidId: its store or user cannot exist.
    """
    store_id = governed_store(governor, asked.store_id)
    _check_meaning(asked, store_id)
    _check_may_give(governor, asked.roles)
    if len(makers(governor)) > MAKERS_MAX:
        message = f"a key comes from at most {MAKERS_MAX} users, each with a key of the one before: take an earlier one"
        raise InvalidField(message, field="key")
    return Key(
        key_id=key_id,
        name=asked.name,
        store_id=store_id,
        user_id=asked.user_id,
        roles=asked.roles,
        decides_for_users=asked.decides_for_users,
        expire_time=asked.expire_time,
        create_time=now,
        create_user_id=governor.user_id,
        create_credential_id=governor.credential_id,
        maker_user_ids=makers(governor),
    )


def check_new(key: Key, live_keys: int, kept_keys: int) -> None:
    """Return if a key may be added to a store that has so many, and so many with those that have ended.

    These are the rules of which another moment may answer otherwise.

    Raises:
        InvalidField: there are too many that are neither revoked nor expired, or it would have ended.
        TooLarge: too many were made and have ended.
    """
    if key.expire_time is not None and key.expire_time <= key.create_time:
        raise InvalidField(_EXPIRE_TIME, field="key.expire_time")
    # What the deployment makes comes from no user.
    live_max, kept_max = (
        round(most * (1 - RESERVED)) if key.maker_user_ids else most for most in (KEYS_MAX, KEPT_KEYS_MAX)
    )
    if live_keys >= live_max:
        raise InvalidField(f"a store has {live_max} keys, which is the most: revoke one first", field="key")
    if kept_keys >= kept_max:
        raise TooLarge(
            f"{kept_max} keys of this store are kept, each for 90 days after its end: make fewer keys that last"
            " longer, or give short-lived callers tokens of an identity provider"
        )


def revoked(governor: Principal, key: Key, *, now: datetime) -> Key:
    """Return a key as it is once a governor has revoked it; one that was revoked stays as it is.

    Raises:
        KeyNotFound: it is none that the governor governs.
    """
    if key.store_id != governor.store_id and not is_deployment(governor):
        raise KeyNotFound
    if key.revoke_time is not None:
        return key
    return replace(key, revoke_time=now, revoke_user_id=governor.user_id, revoke_credential_id=governor.credential_id)


def _check_meaning(asked: Key, store_id: StoreId) -> None:
    check_id(asked.user_id, "user_id")
    if len(asked.name) > NAME_LENGTH_MAX or not asked.name.isprintable():
        raise InvalidField(f"name: at most {NAME_LENGTH_MAX} characters that can be printed", field="key.name")
    if len(asked.roles) > ROLES_MAX or not all(map(is_id, asked.roles)):
        raise InvalidField(f"roles: at most {ROLES_MAX}, each like ^[A-Za-z0-9_-]{{1,64}}$", field="key.roles")
    if not rights(asked.roles):
        raise InvalidField(f"roles: {OWN_ROLES_GO_BESIDE}", field="key.roles")
    if Role.DEPLOYMENT in asked.roles and len(asked.roles) > 1:
        raise InvalidField("roles: deployment stands alone", field="key.roles")
    if (Role.DEPLOYMENT in asked.roles) != (store_id == DEPLOYMENT_STORE):
        wrong = (
            "roles: a key of the deployment is made with another one, without a store (`pawl keys bootstrap` the first)"
            if Role.DEPLOYMENT in asked.roles
            else "store_id: name the store that the key is for (`pawl keys create --in-store`)"
        )
        raise InvalidField(wrong, field="key.store_id")
    if asked.decides_for_users and Role.DELEGATE not in asked.roles:
        raise InvalidField("decides_for_users: only a delegate acts for users", field="key.decides_for_users")
    if asked.expire_time is not None and asked.expire_time >= _TIME_MAX:
        raise InvalidField(_EXPIRE_TIME, field="key.expire_time")


def _check_may_give(governor: Principal, roles: AbstractSet[str]) -> None:
    if is_deployment(governor):
        return
    if not roles and not governor.roles & _DECIDERS:
        raise PermissionDenied("a key without roles decides its own calls: give it a role, such as member")
    if beyond := sorted(roles - governor.roles - _ANYBODY_GIVES):
        raise PermissionDenied(
            f"nobody makes a key with a role that it has not itself: {', '.join(beyond):.200};"
            " a key of the deployment makes any"
        )


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
