"""Defines the versions of a store's agents, and the rules for saving a new version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import AgentCycle, AgentNotFound, TooLarge

# Maximum number of agents per store, not counting deleted ones.
AGENTS_MAX: Final = 500
# Maximum number of agents per store, counting deleted ones.
KEPT_AGENTS_MAX: Final = 1000
# Maximum number of versions of an agent.
VERSIONS_MAX: Final = 1000
# Maximum number of drafts per user.
DRAFTS_MAX: Final = 20


class AgentVersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable version of an agent, or a draft. `definition` is opaque."""

    store_id: StoreId
    name: str
    version: int = 0
    definition: bytes
    tool_names: tuple[str, ...] = ()
    create_time: datetime
    create_user_id: UserId
    create_credential_id: CredentialId = CredentialId("")


class AgentRow(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    delegates_to: tuple[str, ...] = ()
    is_deleted: bool = False


# Returns an agent's newest version, given the store's agents by name, its newest version so far (if any), and the time.
Save: TypeAlias = Callable[[Mapping[str, AgentRow], AgentVersionRow | None, datetime], AgentVersionRow]

# Returns a user's draft, given the store's agents by name, the user's drafts by name, and the time.
SaveDraft: TypeAlias = Callable[[Mapping[str, AgentRow], Mapping[str, AgentVersionRow], datetime], AgentVersionRow]


def saved(
    asked: AgentVersionRow,
    delegates_to: tuple[str, ...],
    agents: Mapping[str, AgentRow],
    newest: AgentVersionRow | None,
) -> AgentVersionRow:
    """Return the newest version of an agent once `asked` is saved: `newest` itself if nothing has changed.

    `agents` has all the store's agents by name. `newest` is this agent's newest version, even if the agent is deleted.

    Raises:
        AgentNotFound: The agent delegates to an agent that does not exist.
        AgentCycle: The agent would delegate to itself, directly or through others.
        TooLarge: The store has too many agents, or the agent has too many versions.
    """
    own = agents.get(asked.name)
    _check_delegation(asked.name, delegates_to, agents)
    is_live = own is not None and not own.is_deleted
    if is_live and newest is not None and _content(newest) == _content(asked):
        return newest
    if not is_live and sum(not agent.is_deleted for agent in agents.values()) >= AGENTS_MAX:
        raise TooLarge(f"a store can have at most {AGENTS_MAX} agents: delete one first")
    if own is None and len(agents) >= KEPT_AGENTS_MAX:
        raise TooLarge(
            f"a store keeps at most {KEPT_AGENTS_MAX} agents, including deleted ones: reuse one of their names"
        )
    version = own.version if own is not None else 0
    if version >= VERSIONS_MAX:
        raise TooLarge(f"an agent can have at most {VERSIONS_MAX} versions: save it under another name")
    return replace(asked, version=version + 1)


def drafted(
    asked: AgentVersionRow,
    delegates_to: tuple[str, ...],
    agents: Mapping[str, AgentRow],
    drafts: Mapping[str, AgentVersionRow],
) -> AgentVersionRow:
    """Return a user's draft once `asked` is saved: the existing draft if nothing has changed.

    `agents` has all the store's agents by name, and `drafts` has all the user's drafts. The delegations of a draft must
    be valid for an agent with its name.

    Raises:
        AgentNotFound, AgentCycle: Same as for `saved`.
        TooLarge: The user has too many drafts.
    """
    _check_delegation(asked.name, delegates_to, agents)
    own = drafts.get(asked.name)
    if own is not None and _content(own) == _content(asked):
        return own
    if own is None and len(drafts) >= DRAFTS_MAX:
        raise TooLarge(f"a user can have at most {DRAFTS_MAX} drafts: delete one first")
    return replace(asked, version=own.version + 1 if own is not None else 1)


def _check_delegation(name: str, delegates_to: tuple[str, ...], agents: Mapping[str, AgentRow]) -> None:
    for other in delegates_to:
        agent = agents.get(other)
        if other != name and (agent is None or agent.is_deleted):
            raise AgentNotFound(f"delegates_to: agent {other!r} does not exist: create it first", agent=other)
    if cycle := cycle_of(name, delegates_to, agents):
        raise AgentCycle(
            f"delegates_to: the cycle {' -> '.join(cycle)} is not allowed: remove one of these delegations"
        )


def cycle_of(name: str, delegates_to: tuple[str, ...], agents: Mapping[str, AgentRow]) -> tuple[str, ...]:
    """Return the cycle that would arise if an agent delegated to these agents; empty if there is none.

    Deleted agents count, because recreating one restores the delegations to it.
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


def _content(version: AgentVersionRow) -> tuple[object, ...]:
    return version.definition, version.tool_names
