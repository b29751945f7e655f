"""Authenticates requests. Turns a credential into a Principal.

Every call must have the credential in its metadata: `authorization: Bearer <key>`. The credential alone determines the
store, the user and the roles. Two kinds of callers may specify another user: the holder of the local key, who owns the
whole suite, and a delegate, which acts for users of its store. A service has its own key and specifies the store and
the user in its requests or metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from pawl.chassis.identity.roles import AGENT_LOOP, OWN_ROLES_GO_BESIDE, ROLES_OF_A_STORE, Role, rights
from pawl.chassis.ids import CredentialId, KeyId, StoreId, UserId, check_id, is_id
from pawl.errors import PermissionDenied, Unauthenticated

# The metadata that identifies the caller.
IDENTITY_METADATA: Final = ("authorization", "pawl-store", "pawl-user", "pawl-roles")
# Metadata with the gateway's service key, in addition to the caller's credential.
GATEWAY_KEY: Final = "pawl-gateway-key"
# Metadata with the address of the gateway's client, in gRPC's format; ignored without GATEWAY_KEY.
CLIENT_ADDRESS: Final = "pawl-client-address"
# Metadata with the user for whom agent-loop forwards a call. Other callers may not send it.
FOR_USER: Final = "pawl-for-user-bin"
# The id of the local key.
LOCAL_CREDENTIAL: Final = CredentialId("local")
# The error for a delegate that tries to decide for a user.
_CANNOT_DECIDE: Final = (
    "a delegate cannot decide: let the user decide with their own key or token,"
    " or use a delegate key with `decides_for_users`"
)
# All rejected keys get the same error, so that it does not reveal which keys exist.
UNKNOWN: Final = "the key is not valid: it is wrong, has expired or was revoked"
NO_KEY: Final = KeyId("")
KEY_LENGTH_MAX: Final = 8192
_ROLES_NAMED_MAX: Final = 32


class LoginRefused(Exception):
    """The cause of an Unauthenticated error. Callers never see it.

    `key_id` is set if the key has expired or was revoked, and empty otherwise.
    """

    def __init__(self, kind: str, key_id: KeyId = NO_KEY) -> None:
        super().__init__(kind)
        self.kind = kind
        self.key_id = key_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. `store_id` is empty for the deployment, and for a service that specifies no store."""

    is_service: bool = False
    store_id: StoreId = StoreId("")
    user_id: UserId = UserId("")
    roles: frozenset[str] = frozenset()
    # The id of the credential, which may be used for many users; never the secret.
    credential_id: CredentialId = CredentialId("")
    # The user of the delegate that acts for `user_id`; empty if there is no delegate.
    delegate_user_id: UserId = UserId("")
    # Other users responsible for the call: the delegate, and the creators of its key. They count where several people
    # must agree.
    people: frozenset[UserId] = frozenset()
    # False for a delegate that may decide neither for its users nor for itself.
    decides: bool = True
    # The caller's entries in `roles.CALLERS`.
    rights: frozenset[str] = frozenset()
    # Unix time at which the credential expires; None if it never does.
    expires_at: float | None = None


def user_principal(
    store_id: StoreId,
    user_id: UserId,
    roles: frozenset[str],
    *,
    credential_id: CredentialId = CredentialId(""),
    delegate_user_id: UserId = UserId(""),
    decides: bool = True,
) -> Principal:
    return Principal(
        store_id=StoreId("") if Role.DEPLOYMENT in roles else store_id,
        user_id=user_id,
        roles=roles,
        credential_id=credential_id,
        delegate_user_id=delegate_user_id,
        decides=decides,
        rights=rights(roles),
    )


def service_principal(name: str) -> Principal:
    right = f"service:{name}"
    return Principal(is_service=True, credential_id=CredentialId(right), rights=frozenset({right}))


def acting_for(service: Principal, metadata: Mapping[str, str]) -> Principal:
    """Return the service as a caller for the store and user in the metadata.

    If the metadata has no store, return `service` unchanged.

    Raises:
        InvalidId: The store or user is not a valid id.
    """
    if "pawl-store" not in metadata:
        return service
    store_id, user_id = check_id(metadata["pawl-store"], "pawl-store"), metadata.get("pawl-user", "")
    return replace(service, store_id=store_id, user_id=check_id(user_id, "pawl-user", optional=True))


GATEWAY: Final = service_principal("gateway")
_current: ContextVar[Principal] = ContextVar("pawl_principal")


def current_principal() -> Principal:
    """Return the caller of the RPC that this task serves.

    Raises:
        Unauthenticated: The task serves no RPC.
    """
    try:
        return _current.get()
    except LookupError:
        raise Unauthenticated from None


def set_principal(principal: Principal) -> None:
    """Make `principal` the caller for the rest of this task, and for the tasks that it starts."""
    _current.set(principal)


def require_user() -> Principal:
    """Return the calling user.

    Raises:
        PermissionDenied: The caller has no store.
    """
    principal = current_principal()
    if not principal.store_id:
        raise PermissionDenied("this method acts for a user: call it with a user's key")
    return principal


def require_decider() -> Principal:
    """Return the calling user, who must have the right to decide on calls.

    Raises:
        PermissionDenied: The caller is a delegate that may not decide, or has no store.
    """
    principal = require_user()
    check_decides(principal)
    return principal


def check_decides(principal: Principal) -> None:
    """Check that a caller may decide on calls. Rejecting is a decision too.

    Raises:
        PermissionDenied: The caller is a delegate that may not decide.
    """
    if not principal.decides:
        raise PermissionDenied(_CANNOT_DECIDE)


def check_may_call(principal: Principal, callers: frozenset[str] | None) -> None:
    """Check that a caller may call a method. If `callers` is None, the method is closed to everyone.

    Raises:
        PermissionDenied: The caller may not call it.
    """
    if callers is not None and not callers.isdisjoint(principal.rights):
        return
    if not principal.rights:
        raise PermissionDenied(f"this call has none of Pawl's roles: {OWN_ROLES_GO_BESIDE}")
    if roles := sorted(ROLES_OF_A_STORE & (callers or frozenset())):
        needed = f"one of the roles {', '.join(roles)}" if len(roles) > 1 else f"the {roles[0]} role"
        raise PermissionDenied(f"this requires {needed}")
    raise PermissionDenied("this method is for Pawl's own services")


def for_user(user: Principal) -> tuple[tuple[str, bytes], ...]:
    return ((FOR_USER, msgspec.json.encode(user)),)


def named_user(metadata: Iterable[tuple[str, str | bytes]]) -> Principal | None:
    """Return the user named in a forwarded call's metadata, or None if no user is named.

    Does not check who sent the metadata.

    Raises:
        PermissionDenied: The metadata does not contain exactly one valid user.
    """
    values = [value for name, value in metadata if name == FOR_USER]
    if not values:
        return None
    try:
        user = msgspec.json.decode(values[0], type=Principal)
    except (msgspec.DecodeError, ValueError, RecursionError):
        user = Principal()
    has_store = is_id(user.store_id) or (not user.store_id and Role.DEPLOYMENT in user.roles)
    if len(values) > 1 or user.is_service or not has_store or not is_id(user.user_id):
        raise PermissionDenied(f"the metadata `{FOR_USER}` must contain exactly one valid user of a store")
    return user


def acting_user(caller: Principal, metadata: Iterable[tuple[str, str | bytes]], *, forwarded: bool) -> Principal:
    """Return the principal of a call: the caller or, for `forwarded` methods, the user named in the metadata.

    Raises:
        PermissionDenied: The method or caller does not allow a user in the metadata, or a forwarded call has none.
    """
    named = [item for item in metadata if item[0] == FOR_USER]
    if not named and not forwarded:
        return caller
    if not forwarded or AGENT_LOOP not in caller.rights:
        raise PermissionDenied(
            f"this method does not accept `{FOR_USER}` from you: only agent-loop sends it, to forward calls"
        )
    user = named_user(named)
    if user is None:
        raise PermissionDenied(
            f"this method requires the metadata `{FOR_USER}`: it answers calls that agent-loop forwards"
        )
    return user


class Authenticator(Protocol):
    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look_up: Callable[[], bool] = lambda: True
    ) -> Principal:
        """Return the caller. `source` is the caller's network address.

        Checking a credential that is known locally costs nothing. For any other credential, `may_look_up` decides
        whether to query another service. If it returns False, the credential counts as unknown.

        Raises:
            Unauthenticated: The credential is missing or unknown.
            PermissionDenied: The credential may not act for the user or store in the metadata.
            InvalidId: The metadata contains an invalid store or user.
            Unavailable: The credential cannot be checked right now.
        """

    def client_of(self, metadata: Mapping[str, str]) -> str:
        """Return the address of the gateway's client in gRPC's format. It is empty if the gateway did not send one."""


def check_not_repeated(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Check that no identity metadata is repeated, because other code may have read a different value.

    Raises:
        Unauthenticated: A name is repeated.
    """
    named = Counter(name for name, _ in metadata if name in IDENTITY_METADATA)
    if twice := [name for name, times in named.items() if times > 1]:
        raise Unauthenticated(f"send the metadata `{twice[0]}` only once")


def check_still(principal: Principal, again: Principal) -> None:
    """Check that authenticating the caller again returned the same identity and no fewer rights.

    Raises:
        Unauthenticated: The credential now belongs to another identity or has fewer rights.
    """
    same = (principal.store_id, principal.user_id, principal.people) == (again.store_id, again.user_id, again.people)
    if not same or not principal.roles <= again.roles or not principal.rights <= again.rights:
        raise Unauthenticated("the key's identity or rights have changed: retry the call")
    if principal.decides and not again.decides:
        raise Unauthenticated("the key's identity or rights have changed: retry the call")


def bearer_key(metadata: Mapping[str, str]) -> str:
    """Return the key of `authorization: Bearer <key>`.

    Raises:
        Unauthenticated: The key is missing, malformed or too long.
    """
    header = metadata.get("authorization")
    if header is None:
        raise Unauthenticated("no key was sent: send it in the metadata `authorization: Bearer <key>`")
    scheme, _, key = header.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > KEY_LENGTH_MAX:
        raise Unauthenticated("the authorization metadata must be `Bearer <key>`, with at most 8192 characters")
    return key


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    # The id in the audit log; never the secret.
    credential_id: CredentialId
    # Empty for the deployment.
    store_id: StoreId
    user_id: UserId
    # May include roles that Pawl does not know.
    roles: frozenset[str]
    # The users who created it, and the keys with which it was created.
    maker_user_ids: frozenset[UserId] = frozenset()
    # True if a delegate may decide for the users it acts for.
    decides_for_users: bool = False
    # Unix time at which it expires.
    expire_time: float | None = None


def principal_of(credential: Credential, metadata: Mapping[str, str]) -> Principal:
    """Return the caller. If the credential is a delegate's, this is the user in `pawl-user`.

    `pawl-roles` lists roles of the delegate, separated by commas. Without `pawl-roles`, the delegate passes on `member`
    if it is a member, or `viewer` if it is a viewer. Otherwise, it passes on all its roles.

    Raises:
        PermissionDenied: The metadata specifies another store, a role that the delegate lacks or, for a caller that is
            not a delegate, another user or any roles.
        InvalidId: The named user is not a valid id.
    """
    store_id, user_id, roles = credential.store_id, credential.user_id, credential.roles
    if metadata.get("pawl-store", store_id) != store_id:
        raise PermissionDenied("the metadata `pawl-store` does not name the key's store: remove it")
    named = metadata.get("pawl-user")
    if "pawl-roles" in metadata and (named is None or Role.DELEGATE not in roles):
        raise PermissionDenied("the metadata `pawl-roles` is only for delegates that specify a user: remove it")
    decides = Role.DELEGATE not in roles or credential.decides_for_users
    if Role.DELEGATE in roles:
        own = roles - {Role.DELEGATE, Role.DEPLOYMENT}
        if named is not None:
            user_id = check_id(named, "pawl-user")
            own = _delegated_roles(own, metadata.get("pawl-roles"))
        roles = own or frozenset({Role.DELEGATE})
    elif named not in (None, user_id):
        raise PermissionDenied(f"this key lacks the delegate role, so it cannot act for {named!r:.80}")
    principal = user_principal(
        store_id,
        user_id,
        roles,
        credential_id=credential.credential_id,
        delegate_user_id=UserId("") if user_id == credential.user_id else credential.user_id,
        decides=decides,
    )
    return replace(
        principal,
        people=frozenset({credential.user_id, *credential.maker_user_ids} - {user_id}),
        expires_at=credential.expire_time,
    )


def local_principal(metadata: Mapping[str, str]) -> Principal:
    """Return the caller for the local key. By default, this is `me` in the store `local`.

    The caller has all roles of a store except `delegate`, or only the roles that `pawl-roles` lists.

    Raises:
        InvalidId: The named store or user is not a valid id.
        PermissionDenied: `pawl-roles` contains any other role.
    """
    store_id = check_id(metadata.get("pawl-store", "local"), "pawl-store")
    user_id = check_id(metadata.get("pawl-user", "me"), "pawl-user")
    named = metadata.get("pawl-roles")
    everything = frozenset[str](ROLES_OF_A_STORE - {Role.DELEGATE})
    roles = everything if named is None else _delegated_roles(everything, named)
    return user_principal(store_id, user_id, roles, credential_id=LOCAL_CREDENTIAL)


def _delegated_roles(own: frozenset[str], named: str | None) -> frozenset[str]:
    if named is None:
        return own & {Role.MEMBER} or own & {Role.VIEWER} or own
    wanted = frozenset(role.strip() for role in named.split(",", _ROLES_NAMED_MAX))
    if not wanted <= own:
        raise PermissionDenied(
            f"`pawl-roles` contains {', '.join(map(repr, sorted(wanted - own)))[:200]}:"
            " a key can pass on only its own roles"
        )
    return wanted
