"""The credentials that a process accepts: the local key, service keys, API keys and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from pawl.chassis.identity.auth import (
    CLIENT_ADDRESS,
    GATEWAY,
    GATEWAY_KEY,
    UNKNOWN,
    Authenticator,
    Credential,
    LoginRefused,
    Principal,
    acting_for,
    bearer_key,
    local_principal,
    principal_of,
    service_principal,
)
from pawl.chassis.identity.roles import OWN_ROLES_GO_BESIDE, Role, rights
from pawl.chassis.ids import CredentialId, KeyId, StoreId, UserId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock, SystemClock
from pawl.chassis.process.watched_file import WatchedFile
from pawl.errors import Unauthenticated
from pawl.server.identity.key_rows import KeyRows, digest_of
from pawl.server.process.settings import ServiceSettings, parse_secret, secret_file

if TYPE_CHECKING:
    from pawl.server.identity.issuers import Issuers


# Prefix of the ids of keys in a file.
_FILE: Final = "file-"
# Prefix of the ids of keys in job-store.
_ROW: Final = "key_"

_log = logs.get_logger(__name__)
T = TypeVar("T")

_Id = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of PAWL_API_KEYS_FILE. A key with the role `deployment` has no store."""

    key: Annotated[str, msgspec.Meta(min_length=16, max_length=4096)]
    store_id: _Id | None = None
    user_id: _Id
    roles: list[_Id] = []
    decides_for_users: bool = False

    def __post_init__(self) -> None:
        if (Role.DEPLOYMENT in self.roles) == (self.store_id is not None):
            raise ValueError("a key must have either a `store_id` or the deployment role")
        if not rights(self.roles):
            raise ValueError(OWN_ROLES_GO_BESIDE)


def parse_keys(content: bytes) -> dict[bytes, Credential]:
    """Return the credentials in an API keys file, by digest.

    The file is a JSON list of {key, store_id, user_id, roles}.

    Raises:
        ValueError: The file is malformed or lists a key twice.
    """
    entries = msgspec.json.decode(content, type=list[ApiKey])
    found = {}
    for entry in entries:
        digest = digest_of(entry.key)
        found[digest] = Credential(
            credential_id=CredentialId(f"{_FILE}{digest.hex()[:16]}"),
            store_id=StoreId(entry.store_id or ""),
            user_id=UserId(entry.user_id),
            roles=frozenset(entry.roles),
            decides_for_users=entry.decides_for_users,
        )
    if len(found) != len(entries):
        raise ValueError("it lists the same key twice")
    return found


def parse_service_keys(content: bytes) -> dict[bytes, Principal]:
    """Return the services by the digests of their keys. The file is JSON: {name: [SHA-256 of a key, in hexadecimal]}.

    Raises:
        ValueError: The file is malformed, or two services share a key.
    """
    services = msgspec.json.decode(content, type=dict[str, list[_Sha256]])
    named = {(digest, name) for name, digests in services.items() for digest in digests}
    found = {bytes.fromhex(digest): service_principal(name) for digest, name in named}
    if len(found) != len(named):
        raise ValueError("two services have the same key")
    return found


def parse_service_key(content: bytes) -> str:
    """Return the service key in a file's content.

    Raises:
        ValueError: The content is not a key that can be sent in a header.
    """
    key = parse_secret(content)
    if not (key.isascii() and key.isprintable()):
        raise ValueError("a key may contain only printable ASCII characters")
    return key


def service_key(settings: ServiceSettings, clock: Clock) -> Callable[[], str] | None:
    """Return a function that returns the key that this service sends to others. A changed key file is reloaded.

    Raises:
        StartError: The file cannot be used.
    """
    if path := secret_file("PAWL_SERVICE_KEY"):
        return WatchedFile(path, "PAWL_SERVICE_KEY_FILE", parse_service_key, clock)
    return settings.service_key.get_secret_value if settings.service_key else None


class KeyAuthenticator:
    """Authenticates users by API keys and tokens, services by service keys, and the owner by the local key.

    All keys are looked up by their SHA-256, so that response times reveal nothing about them.
    """

    def __init__(
        self,
        *,
        keys: Callable[[], Mapping[bytes, Credential]] = dict,
        services: Callable[[], Mapping[bytes, Principal]] = dict,
        rows: KeyRows | None = None,
        local_key: str | None = None,
        issuers: Issuers | None = None,
    ) -> None:
        self._issuers = issuers
        self._keys = keys
        self._rows = rows
        self._services = services
        self._local_digest = None if local_key is None else digest_of(local_key)

    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look_up: Callable[[], bool] = lambda: True
    ) -> Principal:
        key = bearer_key(metadata)
        digest = digest_of(key)
        if digest == self._local_digest:
            return local_principal(metadata)
        if service := self._services().get(digest):
            return acting_for(service, metadata)
        if credential := self._keys().get(digest):
            return principal_of(credential, metadata)
        if self._rows is not None and (row := await self._rows.find(key, may_look_up=may_look_up)):
            return principal_of(row, metadata)
        if self._issuers and (token := await self._token(self._issuers, key, may_look_up)):
            return principal_of(token, metadata)
        raise Unauthenticated(UNKNOWN) from self._why_not(digest)

    def client_of(self, metadata: Mapping[str, str]) -> str:
        service = self._services().get(digest_of(metadata.get(GATEWAY_KEY, "")))
        return metadata.get(CLIENT_ADDRESS, "") if service == GATEWAY else ""

    def _why_not(self, digest: bytes) -> LoginRefused:
        ended = self._rows.ended(digest) if self._rows else None
        if ended is None:
            return LoginRefused("unknown")
        return LoginRefused("revoked" if ended.is_revoked else "expired", KeyId(ended.credential_id))

    async def _token(self, issuers: Issuers, text: str, may_look_up: Callable[[], bool]) -> Credential | None:
        """Return a token's credential, or None if `text` is not a token."""
        from pawl.server.identity.tokens import TokenRefused, is_token  # noqa: PLC0415  # loaded with the issuers

        if not is_token(text):
            return None
        try:
            return await issuers.credential(text, may_look_up=may_look_up)
        except TokenRefused as refused:
            if may_look_up():
                _log.info("token.refused", reason=str(refused))
            raise Unauthenticated(UNKNOWN) from LoginRefused("token")


def read_issuers(settings: ServiceSettings, clock: Clock) -> Issuers | None:
    """Return the token issuers listed in PAWL_OIDC_FILE, or None if it is not set. The caller must run the issuers.

    Raises:
        StartError: The file cannot be used.
    """
    if settings.oidc_file is None:
        return None
    # These modules import cryptography and HTTP (10 MB). Processes without tokens avoid them.
    from pawl.server.identity.issuers import Issuers  # noqa: PLC0415
    from pawl.server.identity.tokens import parse_providers  # noqa: PLC0415

    return Issuers(
        WatchedFile(settings.oidc_file, "PAWL_OIDC_FILE", parse_providers, clock, without=b"[]"), clock=clock
    )


def _file_keys(settings: ServiceSettings, clock: Clock) -> Callable[[], Mapping[bytes, Credential]]:
    if not settings.api_keys_file:
        return dict
    return WatchedFile(settings.api_keys_file, "PAWL_API_KEYS_FILE", parse_keys, clock, without=b"[]")


def gone(
    settings: ServiceSettings, clock: Clock, rows: Callable[[], KeyRows | None] = lambda: None
) -> Callable[[Principal], bool]:
    """Return a function that checks whether a principal's API key is no longer valid.

    A key is no longer valid if it was removed, was assigned to another user, or lost a role that the principal has.
    Other credentials count as valid, and so do keys that cannot be checked right now.

    Raises:
        StartError: The file cannot be used.
    """
    keys = _file_keys(settings, clock)

    def is_gone(principal: Principal) -> bool:
        key_id, known = principal.credential_id, rows()
        found: Credential | None
        if key_id.startswith(_FILE):
            found = next((each for each in keys().values() if each.credential_id == key_id), None)
        elif key_id.startswith(_ROW) and known is not None and not known.is_stale:
            found = known.in_force(key_id)
        else:
            return False
        return found is None or not _gives(found, principal)

    return is_gone


def _gives(credential: Credential, principal: Principal) -> bool:
    whose = principal.delegate_user_id or principal.user_id
    if credential.user_id != whose or credential.store_id not in {StoreId(""), principal.store_id}:
        return False
    if Role.DELEGATE in credential.roles:
        return principal.roles <= credential.roles
    return not principal.delegate_user_id and principal.roles <= principal_of(credential, {}).roles


def authenticator(
    settings: ServiceSettings, *, rows: KeyRows | None = None, issuers: Issuers | None = None
) -> Authenticator:
    """Return the authenticator for these settings, key rows and token issuers.

    Raises:
        StartError: A keys file cannot be used.
    """
    clock = SystemClock()
    local_key = settings.local_key.get_secret_value() if settings.local_key else None
    keys = _file_keys(settings, clock)
    services: Callable[[], Mapping[bytes, Principal]] = dict
    if settings.service_keys_file:
        services = WatchedFile(
            settings.service_keys_file, "PAWL_SERVICE_KEYS_FILE", parse_service_keys, clock, without=b"{}"
        )
    return KeyAuthenticator(keys=keys, services=services, rows=rows, local_key=local_key, issuers=issuers)
