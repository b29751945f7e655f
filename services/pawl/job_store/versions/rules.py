"""Versions of a store's named definitions, such as agents, and the rules for saving a new version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import NotFound, PawlError, TooLarge

# Maximum number of definitions of one kind per store, not counting deleted ones.
LIVE_MAX: Final = 500
# Maximum number of definitions of one kind per store, counting deleted ones.
KEPT_MAX: Final = 1000
# Maximum number of versions of a definition.
VERSIONS_MAX: Final = 1000


class Kind(NamedTuple):
    """A kind of definition. `field` is the field that refers to other definitions of the same kind."""

    name: str
    field: str
    not_found: type[NotFound]
    cycle: type[PawlError]


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable version of a definition. `content` is opaque."""

    store_id: StoreId
    name: str
    version: int = 0
    content: bytes
    create_time: datetime
    create_user_id: UserId
    create_credential_id: CredentialId = CredentialId("")


class DefinitionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A definition, the number of its newest version, and the definitions to which that version refers."""

    name: str
    version: int
    uses: tuple[str, ...] = ()
    is_deleted: bool = False


# Returns the newest version from the store's definitions by name, the newest version so far (if any), and the time.
Save: TypeAlias = Callable[[Mapping[str, DefinitionRow], VersionRow | None, datetime], VersionRow]


def saved(
    kind: Kind,
    requested: VersionRow,
    uses: tuple[str, ...],
    known: Mapping[str, DefinitionRow],
    newest: VersionRow | None,
) -> VersionRow:
    """Return the newest version of a definition after `requested` is saved.

    If nothing has changed, this is `newest` itself. `known` contains all the store's definitions of this kind, by name.
    `newest` is this definition's newest version, even if the definition is deleted.

    Raises:
        kind.not_found: The definition refers to a definition that does not exist.
        kind.cycle: The definition would refer to itself, directly or through others.
        TooLarge: The store has too many definitions, or this one has too many versions.
    """
    own = known.get(requested.name)
    check_uses(kind, requested.name, uses, known)
    is_live = own is not None and not own.is_deleted
    if is_live and newest is not None and newest.content == requested.content:
        return newest
    if not is_live and sum(not each.is_deleted for each in known.values()) >= LIVE_MAX:
        raise TooLarge(f"a store can have at most {LIVE_MAX} {kind.name}s: delete one first")
    if own is None and len(known) >= KEPT_MAX:
        raise TooLarge(
            f"a store keeps at most {KEPT_MAX} {kind.name}s, including deleted ones: reuse one of their names"
        )
    version = own.version if own is not None else 0
    if version >= VERSIONS_MAX:
        raise TooLarge(f"{kind.name}s can have at most {VERSIONS_MAX} versions: save it under another name")
    return replace(requested, version=version + 1)


def check_uses(kind: Kind, name: str, uses: tuple[str, ...], known: Mapping[str, DefinitionRow]) -> None:
    for other in uses:
        found = known.get(other)
        if other != name and (found is None or found.is_deleted):
            raise kind.not_found(
                f"{kind.field}: {kind.name} {other!r} does not exist: create it first", **{kind.name: other}
            )
    if cycle := cycle_of(name, uses, known):
        raise kind.cycle(f"{kind.field}: the cycle {' -> '.join(cycle)} is not allowed: remove one of these references")


def cycle_of(name: str, uses: tuple[str, ...], known: Mapping[str, DefinitionRow]) -> tuple[str, ...]:
    """Return the cycle that references to these definitions would create, or an empty tuple if there is none.

    Deleted definitions count too, because recreating one restores its references.
    """
    came_from: dict[str, str] = {}
    waiting = [(each, name) for each in reversed(uses)]
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
            found = known.get(here)
            waiting += [(each, here) for each in reversed(found.uses)] if found is not None else []
    return ()
