"""Authentication: from the credential of a request to a Principal.

The credential is metadata `authorization: Bearer <key>`, and nobody calls without
one. A user's store and user come from it and from nothing else; only who has the
local key, to whom the whole suite belongs, names them. A service principal (the key that the
services share) may call internal services, and names store and user in the
request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from pawl.chassis.ids import check_id
from pawl.chassis.settings import ServiceSettings
from pawl.chassis.start import StartError
from pawl.errors import PermissionDenied, Unauthenticated


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. `store_id` and `user_id` are empty for a service."""

    is_service: bool = False
    store_id: str = ""
    user_id: str = ""
    roles: frozenset[str] = frozenset()


SERVICE = Principal(is_service=True)
ALL_ROLES: Final = frozenset({"admin", "approver", "member", "operator", "viewer", "worker"})

_current: ContextVar[Principal] = ContextVar("pawl_principal")


def current_principal() -> Principal:
    """Return who called the RPC that this task serves.

    Raises:
        Unauthenticated: the task serves no RPC.
    """
    try:
        return _current.get()
    except LookupError:
        raise Unauthenticated from None


def set_principal(principal: Principal) -> None:
    """Make `principal` the caller for the rest of this task and the tasks it starts."""
    _current.set(principal)


def require_user() -> Principal:
    """Return the calling user.

    Raises:
        PermissionDenied: a service called.
    """
    principal = current_principal()
    if principal.is_service:
        raise PermissionDenied("this method acts for a user: call it with a user's key")
    return principal


def _bearer_key(metadata: Mapping[str, str]) -> str:
    header = metadata.get("authorization")
    if header is None:
        raise Unauthenticated("send metadata `authorization: Bearer <key>`")
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the authorization metadata must be `Bearer <key>`")
    return key.strip()


_Id = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of PAWL_API_KEYS_FILE."""

    key: Annotated[str, msgspec.Meta(min_length=16)]
    store_id: _Id
    user_id: _Id
    roles: list[str] = []


class KeyAuthenticator:
    """Knows users by API keys, services by the service key, and whoever owns this machine by the local key.

    A caller with the local key is whom metadata `pawl-store` and `pawl-user`
    name, or `me` of the store `local`, with every role. An unknown key is looked up
    by its SHA-256, so the time an answer takes tells nothing about the others.
    """

    def __init__(
        self, keys: Iterable[ApiKey] = (), *, service_key: str | None = None, local_key: str | None = None
    ) -> None:
        self._principals = {
            _digest(entry.key): Principal(
                store_id=entry.store_id,
                user_id=entry.user_id,
                roles=frozenset(entry.roles),
            )
            for entry in keys
        }
        if service_key is not None:
            self._principals[_digest(service_key)] = SERVICE
        self._local_digest = None if local_key is None else _digest(local_key)
        # Of keys that were shown and are known, so never more than there are keys.
        self._digests: dict[str, bytes] = {}

    def authenticate(self, metadata: Mapping[str, str], *, service_only: bool) -> Principal:
        """Return who calls by the metadata of a request; `service_only` says that the method is not for users.

        Raises:
            Unauthenticated: no credential, or one that is not known.
            PermissionDenied: a user calls a method that is for services.
            InvalidId: the metadata names a store or user that cannot exist.
        """
        key = _bearer_key(metadata)
        digest = self._digests.get(key) or _digest(key)
        principal = self._principals.get(digest)
        if principal is None:
            if digest != self._local_digest:
                raise Unauthenticated("the key is not known")
            principal = _named_in(metadata)
        self._digests[key] = digest
        if service_only and not principal.is_service:
            raise PermissionDenied("this method is for Pawl's own services")
        return principal


def _named_in(metadata: Mapping[str, str]) -> Principal:
    return Principal(
        store_id=check_id(metadata.get("pawl-store", "local"), "pawl-store"),
        user_id=check_id(metadata.get("pawl-user", "me"), "pawl-user"),
        roles=ALL_ROLES,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def read_keys(path: Path) -> list[ApiKey]:
    """Return the entries of an API keys file: a JSON list of {key, store_id, user_id, roles}.

    Raises:
        StartError: the file cannot be read, has another form or names a key twice.
    """
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[ApiKey])
    except OSError as error:
        raise StartError(f"PAWL_API_KEYS_FILE: cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise StartError(f"PAWL_API_KEYS_FILE: {path}: {error}") from None
    if len({entry.key for entry in keys}) != len(keys):
        raise StartError(f"PAWL_API_KEYS_FILE: {path} has the same key twice")
    return keys


def authenticator(settings: ServiceSettings) -> KeyAuthenticator:
    """Return what the settings ask for: the keys of the key file, or the local key.

    Raises:
        StartError: the key file cannot be used.
    """
    service_key = settings.service_key.get_secret_value() if settings.service_key else None
    local_key = settings.local_key.get_secret_value() if settings.local_key else None
    keys = read_keys(settings.api_keys_file) if settings.api_keys_file else ()
    return KeyAuthenticator(keys, service_key=service_key, local_key=local_key)
