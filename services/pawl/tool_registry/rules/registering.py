"""Checks the registration of a store's tools: ownership, quotas, and conflicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pawl.chassis.identity.auth import Principal, check_decides
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied, ToolExists
from pawl.tools.rules.definition import (
    ToolDefinition,
    ToolVersion,
    definition_hash,
    encode_definition,
    is_laxer,
)

# Source name of front-end tools.
FRONT_END: Final = "store"
# Source kind of worker tools.
WORKER: Final = "worker"
# Source name of workflows that agents may call.
WORKFLOW: Final = "workflow"
# Source name of tools sent with a run.
OWN: Final = "run"
OWN_TOOLS_MAX: Final = 64
# Maximum total size of a store's definitions in one run. Messages between services can hold more.
TOOLS_BYTES_MAX: Final = 4 * 1024 * 1024
# The registrant of a source's tools. The admin who approves a source also approves its tools.
SOURCE: Final = Principal(roles=frozenset({Role.ADMIN}))


# Maximum number of registered tools by source kind: for one user who is not an admin, and for a store. Tools of other
# kinds are limited by their sources.
QUOTAS: Final = {FRONT_END: (100, 1000), WORKER: (500, 2000)}


# Loaded tools that a run gets only if it or its agent lists them.
OPT_IN: Final = frozenset({"remember", "recall", "forget"})


def without_opt_in(entries: Iterable[ToolVersion]) -> list[ToolVersion]:
    """Return the tools that a run gets if it does not list any."""
    return [entry for entry in entries if entry.store_id or entry.definition.name not in OPT_IN]


def chosen(entries: Sequence[ToolVersion], names: Sequence[str], user_id: UserId, most: int) -> list[ToolVersion]:
    """Return at most `most` tools that together fit into TOOLS_BYTES_MAX. If `most` is 0, return all tools.

    Tools are chosen in the order of `names`. If `names` is empty, the tools closest to the user are chosen first. Tools
    registered later or by other users never displace earlier ones.
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
        # The deployment's tools do not count, because they are small and chosen by its operator.
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
    """Check that a source may register a name. An admin may also take over a front-end tool's name.

    Raises:
        ToolExists: The name belongs to another source.
    """
    is_freed = current.source == FRONT_END and Role.ADMIN in registrant.roles
    if current.source != source and not is_freed:
        raise ToolExists(f"{current.definition.name!r} is a tool of the source {current.source!r}")


def check_owner(current: ToolVersion, registrant: Principal) -> None:
    """Check that the registrant may replace or unregister a front-end tool.

    Raises:
        PermissionDenied: Another user registered it.
    """
    if Role.ADMIN not in registrant.roles and current.user_id != registrant.user_id:
        raise PermissionDenied(
            f"another user registered {current.definition.name!r}: choose another name, or ask an admin"
        )


def check_not_laxer(new: ToolDefinition, earlier: ToolVersion | None, registrant: Principal) -> None:
    """Check that a definition may replace the newest one with the same name, even if the latter is unregistered.

    Raises:
        PermissionDenied: The definition is laxer, and the registrant is not an admin or is a delegate without decision
            rights.
    """
    if earlier is None or not is_laxer(new, earlier.definition):
        return
    if Role.ADMIN not in registrant.roles:
        raise PermissionDenied(
            f"relaxing {new.name!r} (fewer approvals, or more users who may call it) requires the admin role"
        )
    check_decides(registrant)


def check_quota(source_kind: str, registrant: Principal, *, of_user: int, of_store: int) -> None:
    """Check that the quotas of the registrant and the store allow one more tool of this kind.

    Raises:
        InvalidField: The user's or the store's quota is exhausted.
    """
    most_of_user, most_of_store = QUOTAS.get(source_kind, (math.inf, math.inf))
    if of_store >= most_of_store:
        whose, most = "the store already has", most_of_store
    elif of_user >= most_of_user and Role.ADMIN not in registrant.roles:
        whose, most = "you already have", most_of_user
    else:
        return
    raise InvalidField(f"name: {whose} {most} tools of this kind: unregister some first", field="name")


def own_version(store_id: StoreId, definition: ToolDefinition) -> ToolVersion:
    """Return the only version of a tool that was sent with a run.

    The tool counts as newer than any rule, because it did not exist when the rule was created. No rule can therefore
    allow its calls.
    """
    return ToolVersion(store_id=store_id, definition=definition, version=1, source=OWN, create_time=math.inf)


def own_label(tool_name: str, definition_sha256: str) -> str:
    """Return a unique name by which the audit chain identifies a tool sent with a run."""
    return f"{tool_name}@{definition_sha256[:12]}"


def check_own(definitions: Sequence[ToolDefinition]) -> None:
    """Check the tools sent with a run. `Catalog` makes the other checks, which also apply to RegisterTool.

    Raises:
        InvalidField: There are too many tools, two tools have the same name, or a tool restricts its callers.
    """
    if not 1 <= len(definitions) <= OWN_TOOLS_MAX:
        raise InvalidField(
            f"front_end_tools must have 1 to {OWN_TOOLS_MAX} tools, got {len(definitions)}", field="front_end_tools"
        )
    names = set[str]()
    for definition in definitions:
        if definition.name in names:
            raise InvalidField(
                f"front_end_tools: {definition.name!r} appears twice: give each tool its own name",
                field="front_end_tools",
            )
        names.add(definition.name)
        if definition.allowed_user_ids or definition.allowed_roles:
            raise InvalidField(
                f"front_end_tools: {definition.name!r} is only for its run: remove allowed_user_ids and allowed_roles",
                field="front_end_tools",
            )


def check_not_shadowing(definitions: Iterable[ToolDefinition], others: Iterable[ToolVersion]) -> None:
    """Check that tools sent with a run do not have the names of other tools.

    A registered front-end tool with the same definition counts as the same tool.

    Raises:
        ToolExists: A name is already taken.
    """
    # Models see the dot in a source tool's name as two underscores.
    taken = {entry.definition.name.replace(".", "__"): entry for entry in others}
    for definition in definitions:
        other = taken.get(definition.name)
        if other is None:
            continue
        is_same = other.source == FRONT_END and definition_hash(other.definition) == definition_hash(definition)
        if not is_same:
            raise ToolExists(
                f"a tool {other.definition.name!r} ({other.source}) already exists: rename the one sent with this run"
            )
