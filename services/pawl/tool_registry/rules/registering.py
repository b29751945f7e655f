"""Registering the tools of a store: by whom, in whose place, and how many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pawl.chassis.identity.auth import Principal, check_decides
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied, ToolExists
from pawl.tool_registry.rules.definition import (
    ToolDefinition,
    ToolVersion,
    definition_hash,
    encode_definition,
    is_laxer,
)

FRONT_END: Final = "store"
"""The source of front-end tools."""
WORKER: Final = "worker"
"""The kind of source of workers' tools."""
OWN: Final = "run"
"""The source of tools that came with a run."""
OWN_TOOLS_MAX: Final = 64
"""Most tools that come with a run."""
TOOLS_BYTES_MAX: Final = 4 * 1024 * 1024
"""Definitions of the store in one run; a message between services holds more."""
SOURCE: Final = Principal(roles=frozenset({Role.ADMIN}))
"""The registrant of the tools of a source: they are approved with it, by those who may."""


SHARES: Final = {FRONT_END: (100, 1000), WORKER: (500, 2000)}
"""The most tools that may be registered, by kind of source: by one user who is no admin, and in a store.

The tools of other kinds are bounded with their sources.
"""


OPT_IN: Final = frozenset({"remember", "recall", "forget"})
"""Tools of the deployment that a run has only if it, or its agent, names them."""


def without_opt_in(entries: Iterable[ToolVersion]) -> list[ToolVersion]:
    """Return the tools of a run that names none."""
    return [entry for entry in entries if entry.store_id or entry.definition.name not in OPT_IN]


def chosen(entries: Sequence[ToolVersion], names: Sequence[str], user_id: UserId, most: int) -> list[ToolVersion]:
    """Return at most so many of the tools that a user may call, in TOOLS_BYTES_MAX; 0 means all.

    What is registered later, or by another user, pushes nothing out.
    """
    if not most:
        return list(entries)
    places = {name: place for place, name in reversed(list(enumerate(names)))}

    def rank(entry: ToolVersion) -> tuple[int, float, str]:
        place = places.get(entry.definition.name, len(names)) if names else _closeness(entry, user_id)
        return place, entry.create_time, entry.definition.name

    taken, left = list[ToolVersion](), TOOLS_BYTES_MAX
    for entry in sorted(entries, key=rank):
        if len(taken) == most:
            break
        # Those of the deployment are small, and as it wants them.
        size = len(encode_definition(entry.definition)) if entry.store_id else 0
        if size <= left:
            taken.append(entry)
            left -= size
    return taken


def _closeness(entry: ToolVersion, user_id: UserId) -> int:
    if not entry.store_id:
        return 0
    if entry.source != FRONT_END:
        return 2
    return 1 if entry.user_id == user_id else 3


def check_source(current: ToolVersion, source: str, registrant: Principal) -> None:
    """Return if a source may register the name of a tool: its own, or that of a front-end tool for an admin.

    Raises:
        ToolExists: it may not.
    """
    is_freed = current.source == FRONT_END and Role.ADMIN in registrant.roles
    if current.source != source and not is_freed:
        raise ToolExists(f"{current.definition.name!r} is a tool of the source {current.source!r}")


def check_owner(current: ToolVersion, registrant: Principal) -> None:
    """Return if a front-end tool is the registrant's to replace and to take out.

    Raises:
        PermissionDenied: another user has registered it.
    """
    if Role.ADMIN not in registrant.roles and current.user_id != registrant.user_id:
        raise PermissionDenied(
            f"{current.definition.name!r} is the tool of another user: take another name, or ask an admin"
        )


def check_not_laxer(new: ToolDefinition, earlier: ToolVersion | None, registrant: Principal) -> None:
    """Return if a definition may follow the newest one that its name has had in the store, registered still or not.

    Raises:
        PermissionDenied: it is laxer, and the registrant no admin, or a delegate that does not decide.
    """
    if earlier is None or not is_laxer(new, earlier.definition):
        return
    if Role.ADMIN not in registrant.roles:
        raise PermissionDenied(
            f"to ask people less about {new.name!r}, or let more of them call it, needs the role admin"
        )
    check_decides(registrant)


def check_share(source_kind: str, registrant: Principal, *, of_user: int, of_store: int) -> None:
    """Return if one more tool of the kind fits, beside so many of the registrant and of the store.

    Raises:
        InvalidField: the share of the user or of the store is full.
    """
    most_of_user, most_of_store = SHARES.get(source_kind, (math.inf, math.inf))
    if of_store >= most_of_store:
        whose, most = "the store has", most_of_store
    elif of_user >= most_of_user and Role.ADMIN not in registrant.roles:
        whose, most = "you have", most_of_user
    else:
        return
    raise InvalidField(f"name: {whose} {most} tools of this kind: unregister some first", field="name")


def own_version(store_id: StoreId, definition: ToolDefinition) -> ToolVersion:
    """Return a tool that came with a run as a version: the only one, for it never changes.

    It is newer than every rule, so that none allows its calls: whoever made the rule did not know it.
    """
    return ToolVersion(store_id=store_id, definition=definition, version=1, source=OWN, create_time=math.inf)


def own_label(tool_name: str, definition_sha256: str) -> str:
    """Return the name in the audit chain of a tool that came with a run: that of no other tool, nor of its model."""
    return f"{tool_name}@{definition_sha256[:12]}"


def check_own(definitions: Sequence[ToolDefinition]) -> None:
    """Return if these may come together with one run, as far as they do not say what RegisterTool refuses.

    Raises:
        InvalidField: they are too many, two have one name, or one says who may call it.
    """
    if not 1 <= len(definitions) <= OWN_TOOLS_MAX:
        raise InvalidField(f"front_end_tools: 1 to {OWN_TOOLS_MAX} tools", field="front_end_tools")
    names = set[str]()
    for definition in definitions:
        if definition.name in names:
            raise InvalidField(
                f"front_end_tools: {definition.name!r} comes twice: give each tool a name of its own",
                field="front_end_tools",
            )
        names.add(definition.name)
        if definition.allowed_user_ids or definition.allowed_roles:
            raise InvalidField(
                f"front_end_tools: {definition.name!r} is for the user of its run: leave out who may call it",
                field="front_end_tools",
            )


def check_not_shadowing(definitions: Iterable[ToolDefinition], others: Iterable[ToolVersion]) -> None:
    """Return if tools that come with a run take the name of none of the others.

    A front-end tool of the register with the same definition is the same tool.

    Raises:
        ToolExists: one does.
    """
    # A model is shown the dot of a source as two underscores.
    taken = {entry.definition.name.replace(".", "__"): entry for entry in others}
    for definition in definitions:
        other = taken.get(definition.name)
        if other is None:
            continue
        is_same = other.source == FRONT_END and definition_hash(other.definition) == definition_hash(definition)
        if not is_same:
            raise ToolExists(
                f"there is a tool {other.definition.name!r} ({other.source}) already:"
                " give the one of this run another name"
            )
