"""The agents of a store in versions, and the rules by which a new one is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import AgentCycle, AgentNotFound, TooLarge

AGENTS_MAX: Final = 500
"""Most agents of a store that are not deleted."""
KEPT_AGENTS_MAX: Final = 1000
"""Most agents of a store with those that were deleted."""
VERSIONS_MAX: Final = 1000
"""Most versions of an agent."""
DRAFTS_MAX: Final = 20
"""Most drafts of a user."""


class AgentVersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an agent, or a draft; `definition` is opaque. It never changes."""

    store_id: StoreId
    name: str
    version: int = 0
    definition: bytes
    tool_names: tuple[str, ...] = ()
    create_time: datetime
    create_user_id: UserId
    create_credential_id: CredentialId = CredentialId("")


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    """An agent: the number of its newest version, to whom that delegates, and whether it was deleted."""

    name: str
    version: int
    delegates_to: tuple[str, ...] = ()
    is_deleted: bool = False


Save: TypeAlias = Callable[[Mapping[str, AgentRow], AgentVersionRow | None, datetime], AgentVersionRow]
"""The newest version of an agent, from all agents of its store by name, its newest version so far, and the time."""

SaveDraft: TypeAlias = Callable[[Mapping[str, AgentRow], Mapping[str, AgentVersionRow], datetime], AgentVersionRow]
"""A draft of a user, from all agents of its store by name, all drafts of the user by name, and the time."""


def saved(
    asked: AgentVersionRow,
    delegates_to: tuple[str, ...],
    agents: Mapping[str, AgentRow],
    newest: AgentVersionRow | None,
) -> AgentVersionRow:
    """Return the newest version of an agent once `asked` is saved: `newest` itself if nothing is new.

    `agents` are all of the store by name, `newest` is the newest version of this one, also if it was deleted.

    Raises:
        AgentNotFound: it delegates to one that is not there.
        AgentCycle: it would delegate to itself, perhaps through others.
        TooLarge: the store has too many agents, or this one too many versions.
    """
    own = agents.get(asked.name)
    _check_delegation(asked.name, delegates_to, agents)
    is_live = own is not None and not own.is_deleted
    if is_live and newest is not None and _says(newest) == _says(asked):
        return newest
    if not is_live and sum(not agent.is_deleted for agent in agents.values()) >= AGENTS_MAX:
        raise TooLarge(f"a store has at most {AGENTS_MAX} agents: delete one first")
    if own is None and len(agents) >= KEPT_AGENTS_MAX:
        raise TooLarge(
            f"{KEPT_AGENTS_MAX} agents of this store are kept, also the deleted ones: take one of their names"
        )
    version = own.version if own is not None else 0
    if version >= VERSIONS_MAX:
        raise TooLarge(f"an agent has at most {VERSIONS_MAX} versions: go on with one of another name")
    return replace(asked, version=version + 1)


def drafted(
    asked: AgentVersionRow,
    delegates_to: tuple[str, ...],
    agents: Mapping[str, AgentRow],
    drafts: Mapping[str, AgentVersionRow],
) -> AgentVersionRow:
    """Return the draft of a user once `asked` is saved: the one that was there if nothing is new.

    `agents` are all of the store by name, `drafts` those of the user. A draft could be saved as an agent of its name.

    Raises:
        AgentNotFound, AgentCycle: as `saved`.
        TooLarge: the user has too many.
    """
    _check_delegation(asked.name, delegates_to, agents)
    own = drafts.get(asked.name)
    if own is not None and _says(own) == _says(asked):
        return own
    if own is None and len(drafts) >= DRAFTS_MAX:
        raise TooLarge(f"a user has at most {DRAFTS_MAX} drafts: delete one first")
    return replace(asked, version=own.version + 1 if own is not None else 1)


def _check_delegation(name: str, delegates_to: tuple[str, ...], agents: Mapping[str, AgentRow]) -> None:
    for other in delegates_to:
        there = agents.get(other)
        if other != name and (there is None or there.is_deleted):
            raise AgentNotFound(f"delegates_to: there is no agent {other!r}: make it first", agent=other)
    if cycle := cycle_of(name, delegates_to, agents):
        raise AgentCycle(f"delegates_to: {' -> '.join(cycle)}: take one of these steps out")


def cycle_of(name: str, delegates_to: tuple[str, ...], agents: Mapping[str, AgentRow]) -> tuple[str, ...]:
    """Return a way from an agent back to itself if it delegated to these, by name; an empty one if there is none.

    Deleted agents count: one that is made again is delegated to again.
    """
    came_from: dict[str, str] = {}
    waiting = [(each, name) for each in reversed(delegates_to)]
    while waiting:
        here, before = waiting.pop()
        if here == name:
            way = [name]
            while before != name:
                way.append(before)
                before = came_from[before]
            return (name, *reversed(way[1:]), name)
        if here not in came_from:
            came_from[here] = before
            agent = agents.get(here)
            waiting += [(each, here) for each in reversed(agent.delegates_to)] if agent is not None else []
    return ()


def _says(version: AgentVersionRow) -> tuple[object, ...]:
    return version.definition, version.tool_names
