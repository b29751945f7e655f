"""Registering the tools of a store: by whom, in whose place, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from services.errors import InvalidField, PermissionDenied
from services.tool_registry.domain.definition import Caller, ToolDefinition, ToolVersion, is_laxer
from services.tool_registry.domain.roles import ADMIN, MEMBER

FRONT_END: Final = "store"
"""The source of front-end tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registrant:
    """A user who registers tools, and whether as an admin."""

    user_id: str = ""
    is_admin: bool = True

    @classmethod
    def of(cls, caller: Caller) -> Registrant:
        """Return the caller as a registrant."""
        return cls(user_id=caller.user_id, is_admin=ADMIN in caller.roles)


SOURCE: Final = Registrant()
"""The registrant of the tools of a source: they are approved with it, by those who may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How many tools of one kind may be registered: by one user who is no admin, and in a store."""

    of_user: int
    of_store: int


SHARES: Final[Mapping[str, Share]] = MappingProxyType(
    {FRONT_END: Share(of_user=100, of_store=1000), "worker": Share(of_user=500, of_store=2000)}
)
"""The shares by kind of source. The tools of other kinds are bounded with their sources."""


def may_register(caller: Caller) -> bool:
    """Whether a caller registers front-end tools: members and admins do, and whoever has no roles at all."""
    return not caller.roles or not caller.roles.isdisjoint({ADMIN, MEMBER})


def check_owner(current: ToolVersion, registrant: Registrant) -> None:
    """Return if a front-end tool is the registrant's to replace and to take out.

    Raises:
        PermissionDenied: another user has registered it.
    """
    if not registrant.is_admin and current.user_id != registrant.user_id:
        name = current.definition.name
        raise PermissionDenied(f"{name!r} is the tool of another user: take another name, or ask an admin")


def check_not_laxer(new: ToolDefinition, earlier: ToolVersion | None, registrant: Registrant) -> None:
    """Return if a definition may follow the newest one that its name has had in the store, registered still or not.

    Raises:
        PermissionDenied: it is laxer, and the registrant no admin.
    """
    if earlier is not None and not registrant.is_admin and is_laxer(new, earlier.definition):
        raise PermissionDenied(
            f"to ask people less about {new.name!r}, or let more of them call it, needs the role admin"
        )


def check_share(source_kind: str, registrant: Registrant, *, of_user: int, of_store: int) -> None:
    """Return if one more tool of the kind fits, beside so many of the registrant and of the store.

    Raises:
        InvalidField: the share of the user or of the store is full.
    """
    share = SHARES.get(source_kind)
    if share is None:
        return
    if of_store >= share.of_store:
        whose, most = "the store has", share.of_store
    elif of_user >= share.of_user and not registrant.is_admin:
        whose, most = "you have", share.of_user
    else:
        return
    raise InvalidField(f"name: {whose} {most} tools of this kind: unregister some first", field="name")
