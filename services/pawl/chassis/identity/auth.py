"""Authentication: from the credential of a request to a Principal.

The credential is metadata `authorization: Bearer <key>`, and nobody calls without
one. Store, user and roles come from it and from nothing else, but for two that say for
whom they call: the local key, to whose owner the whole suite belongs, and a delegate, which
acts for users of its store. A service has a key of its own, and names store and user in its requests or metadata.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, Protocol

import msgspec

from pawl.chassis.identity.roles import AGENT_LOOP, OWN_ROLES_GO_BESIDE, ROLES_OF_A_STORE, Role, rights
from pawl.chassis.ids import CredentialId, StoreId, UserId, check_id, is_id
from pawl.errors import PermissionDenied, Unauthenticated

WHO_CALLS: Final = ("authorization", "pawl-store", "pawl-user", "pawl-roles")
"""The metadata that say who calls."""
GATEWAY_KEY: Final = "pawl-gateway-key"
"""The metadata with the service key of the gateway, beside the credential of the caller."""
CLIENT_ADDRESS: Final = "pawl-client-address"
"""The metadata with the address of the gateway's client, in gRPC's format; ignored without GATEWAY_KEY."""
FOR_USER: Final = "pawl-for-user-bin"
"""The metadata with the user for whom agent-loop forwards a call. Anybody else who sends it is refused."""
LOCAL_CREDENTIAL: Final = CredentialId("local")
"""The id of the local key."""
_DECIDES_NOTHING: Final = (
    "a delegate does not decide: have the person do it with a key or token of their own,"
    " or use a key of a delegate that says `decides_for_users`"
)
"""The answer to a delegate that would say yes in place of a person."""
KEY_LENGTH_MAX: Final = 8192
_ROLES_NAMED_MAX: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller. `store_id` is empty for the deployment, and for a service that names no store."""

    is_service: bool = False
    store_id: StoreId = StoreId("")
    user_id: UserId = UserId("")
    roles: frozenset[str] = frozenset()
    credential_id: CredentialId = CredentialId("")
    """The credential itself, which may stand for many users; never the secret."""
    delegate_user_id: UserId = UserId("")
    """The user of the delegate that acts for `user_id`; empty if nobody does."""
    people: frozenset[UserId] = frozenset()
    """Other users whose act it is, too, where several people are needed: of the delegate, and makers of its key."""
    decides: bool = True
    """False for a delegate that decides nothing, for those it acts for and for itself."""
    rights: frozenset[str] = frozenset()
    """The callers of `roles.CALLERS` that it is."""
    expires_at: float | None = None
    """The time of day, in seconds since 1970, from which on its credential counts no more; None for never."""


def user_principal(
    store_id: StoreId,
    user_id: UserId,
    roles: frozenset[str],
    *,
    credential_id: CredentialId = CredentialId(""),
    delegate_user_id: UserId = UserId(""),
    decides: bool = True,
) -> Principal:
    """Return the principal of a user of a store, or of the deployment, by its roles."""
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
    """Return the principal of one of Pawl's own services, by its name such as `agent-loop`."""
    right = f"service:{name}"
    return Principal(is_service=True, credential_id=CredentialId(right), rights=frozenset({right}))


def acting_for(service: Principal, metadata: Mapping[str, str]) -> Principal:
    """Return a service that acts for the store and user in the metadata, or for none without `pawl-store`.

    Raises:
        InvalidId: the named store or user cannot exist.
    """
    if "pawl-store" not in metadata:
        return service
    store_id, user_id = check_id(metadata["pawl-store"], "pawl-store"), metadata.get("pawl-user", "")
    return replace(service, store_id=store_id, user_id=check_id(user_id, "pawl-user", optional=True))


GATEWAY: Final = service_principal("gateway")
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
        PermissionDenied: somebody else called, who has no store.
    """
    principal = current_principal()
    if not principal.store_id:
        raise PermissionDenied("this method acts for a user: call it with a user's key")
    return principal


def require_decider() -> Principal:
    """Return the calling user, who may say yes to what people are asked about.

    Raises:
        PermissionDenied: it is a delegate that decides nothing, or nobody of a store.
    """
    principal = require_user()
    check_decides(principal)
    return principal


def check_decides(principal: Principal) -> None:
    """Return if a caller decides anything at all: to reject is a decision, too.

    Raises:
        PermissionDenied: it is a delegate that does not.
    """
    if not principal.decides:
        raise PermissionDenied(_DECIDES_NOTHING)


def check_may_call(principal: Principal, callers: frozenset[str] | None) -> None:
    """Return if a caller is among those who may call a method; `callers` is None for a method that nobody may call.

    Raises:
        PermissionDenied: it is not.
    """
    if callers is not None and not callers.isdisjoint(principal.rights):
        return
    if not principal.rights:
        raise PermissionDenied(f"none of the roles of this call is Pawl's: {OWN_ROLES_GO_BESIDE}")
    if roles := sorted(ROLES_OF_A_STORE & (callers or frozenset())):
        one_of = "one of the roles" if len(roles) > 1 else "the role"
        raise PermissionDenied(f"this needs {one_of} {', '.join(roles)}")
    raise PermissionDenied("this method is for Pawl's own services")


def for_user(user: Principal) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call that agent-loop forwards for a user."""
    return ((FOR_USER, msgspec.json.encode(user)),)


def named_user(metadata: Iterable[tuple[str, str | bytes]]) -> Principal | None:
    """Return the user whom the metadata of a forwarded call name, without asking who sent them; None for nobody.

    Raises:
        PermissionDenied: they name nobody who can be a user.
    """
    values = [value for name, value in metadata if name == FOR_USER]
    if not values:
        return None
    try:
        user = msgspec.json.decode(values[0], type=Principal)
    except (msgspec.DecodeError, ValueError, RecursionError):
        user = Principal()
    if len(values) > 1 or user.is_service or not is_id(user.store_id) or not is_id(user.user_id):
        raise PermissionDenied(f"this method needs one user of a store in the metadata `{FOR_USER}`")
    return user


def acting_user(caller: Principal, metadata: Iterable[tuple[str, str | bytes]], *, forwarded: bool) -> Principal:
    """Return for whom a call acts: the caller, or for a method that takes `forwarded` calls the user that they name.

    Raises:
        PermissionDenied: a user is named to another method or by another caller than agent-loop, or none is named.
    """
    named = [item for item in metadata if item[0] == FOR_USER]
    if not named and not forwarded:
        return caller
    if not forwarded or AGENT_LOOP not in caller.rights:
        raise PermissionDenied(
            f"this method takes no `{FOR_USER}` from you: only agent-loop sends it, to forward calls"
        )
    user = named_user(named)
    if user is None:
        raise PermissionDenied(
            f"this method needs the metadata `{FOR_USER}`: it answers calls that agent-loop forwards"
        )
    return user


class Authenticator(Protocol):
    """Turns the metadata of a request into a Principal."""

    async def authenticate(
        self, metadata: Mapping[str, str], *, source: str, may_look: Callable[[], bool] = lambda: True
    ) -> Principal:
        """Return who calls; `source` is the address of the caller.

        What is known here is found at no cost. Else `may_look` is asked whether to look
        further, where others know more; if not, it counts as unknown.

        Raises:
            Unauthenticated: no credential, or one that is not known.
            PermissionDenied: the metadata name somebody else for whom the credential may not act.
            InvalidId: the metadata name a store or user that cannot exist.
            Unavailable: who it is cannot be told now.
        """

    def client_of(self, metadata: Mapping[str, str]) -> str:
        """Return the address of the client for whom the gateway calls, in gRPC's format; empty for none."""


def check_said_once(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Return if a call does not say twice who calls: readers before this one may have believed the other.

    Raises:
        Unauthenticated: it does.
    """
    named = Counter(name for name, _ in metadata if name in WHO_CALLS)
    if twice := [name for name, times in named.items() if times > 1]:
        raise Unauthenticated(f"send the metadata `{twice[0]}` once")


def check_still(principal: Principal, again: Principal) -> None:
    """Return if whoever called as `principal` is `again` the same, with no less.

    Raises:
        Unauthenticated: the credential stands for somebody else by now, or for less.
    """
    same = (principal.store_id, principal.user_id, principal.people) == (again.store_id, again.user_id, again.people)
    if not same or not principal.roles <= again.roles or not principal.rights <= again.rights:
        raise Unauthenticated("the key has changed: call again")
    if principal.decides and not again.decides:
        raise Unauthenticated("the key has changed: call again")


def bearer_key(metadata: Mapping[str, str]) -> str:
    """Return the key of `authorization: Bearer <key>`.

    Raises:
        Unauthenticated: there is none, or one of another form or size.
    """
    header = metadata.get("authorization")
    if header is None:
        raise Unauthenticated("no key was sent: it goes into the metadata `authorization: Bearer <key>`")
    scheme, _, key = header.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > KEY_LENGTH_MAX:
        raise Unauthenticated("the authorization metadata must be `Bearer <key>`, of at most 8192 characters")
    return key


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """The rights that a key or token brings, whatever its kind."""

    credential_id: CredentialId
    """Its name in the audit; never the secret."""
    store_id: StoreId
    """Empty for the deployment's."""
    user_id: UserId
    roles: frozenset[str]
    """Known ones and others."""
    maker_user_ids: frozenset[UserId] = frozenset()
    """The users who made it, and the keys with which it was made."""
    decides_for_users: bool = False
    """True if a delegate may decide for those it acts for."""
    expire_time: float | None = None
    """The end of its validity, in seconds since 1970."""


def principal_of(credential: Credential, metadata: Mapping[str, str]) -> Principal:
    """Return who calls with a credential: its user, or for a delegate whom `pawl-user` names, with `pawl-roles`.

    A delegate hands on `member`, or `viewer` if that is all it has, unless `pawl-roles` names others
    of its roles, with commas between.

    Raises:
        PermissionDenied: somebody else is named, or roles are, and it is no delegate; or roles are that it has not.
        InvalidId: the named user cannot exist.
    """
    store_id, user_id, roles = credential.store_id, credential.user_id, credential.roles
    if metadata.get("pawl-store", store_id) != store_id:
        raise PermissionDenied("the metadata `pawl-store` names another store than that of the key: leave it out")
    named = metadata.get("pawl-user")
    if "pawl-roles" in metadata and (named is None or Role.DELEGATE not in roles):
        raise PermissionDenied("the metadata `pawl-roles` is for a delegate that names a user: leave it out")
    decides = Role.DELEGATE not in roles or credential.decides_for_users
    if Role.DELEGATE in roles:
        own = roles - {Role.DELEGATE, Role.DEPLOYMENT}
        if named is not None:
            user_id = check_id(named, "pawl-user")
            own = _handed_on(own, metadata.get("pawl-roles"))
        roles = own or frozenset({Role.DELEGATE})
    elif named not in (None, user_id):
        raise PermissionDenied(f"this key has not the role delegate: it does not act for {named!r:.80}")
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
    """Return who calls with the local key: `me` of the store `local`, or who is named, with every role of a store.

    Raises:
        InvalidId: the named store or user cannot exist.
        PermissionDenied: `pawl-roles` names what is no role of a store.
    """
    store_id = check_id(metadata.get("pawl-store", "local"), "pawl-store")
    user_id = check_id(metadata.get("pawl-user", "me"), "pawl-user")
    named = metadata.get("pawl-roles")
    everything = frozenset[str](ROLES_OF_A_STORE - {Role.DELEGATE})
    roles = everything if named is None else _handed_on(everything, named)
    return user_principal(store_id, user_id, roles, credential_id=LOCAL_CREDENTIAL)


def _handed_on(own: frozenset[str], named: str | None) -> frozenset[str]:
    if named is None:
        return own & {Role.MEMBER} or own & {Role.VIEWER} or own
    wanted = frozenset(role.strip() for role in named.split(",", _ROLES_NAMED_MAX))
    if not wanted <= own:
        raise PermissionDenied(
            f"`pawl-roles` names {', '.join(map(repr, sorted(wanted - own)))[:200]}:"
            " a key hands on roles that it has itself, and no others"
        )
    return wanted
