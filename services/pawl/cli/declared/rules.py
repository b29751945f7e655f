"""The rules of `pawl apply`: ownership, order and steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from graphlib import TopologicalSorter
from typing import Final, NamedTuple

# In dependency order: an agent may use a source's tools, a rule may name an agent, and so on.
KINDS: Final = ("settings", "source", "agent", "workflow", "rule", "schedule", "trigger", "channel")


def folder(kind: str) -> str:
    return kind if kind.endswith("s") else f"{kind}s"


class Key(NamedTuple):
    """Identifies a resource within its store or user."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name if self.kind == "agent" else f"{self.kind} {self.name}"


class Owner(NamedTuple):
    """The set that owns a resource, and the version of its declaration."""

    set_name: str
    version: int


class Action(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    KEEP = "keep"
    # Even if the resource is gone and only its declaration remains.
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Step:
    """One change. If `claims` is set, first write the declaration, whose current version is `version`."""

    action: Action
    key: Key
    version: int
    claims: bool


def ordered(references: Mapping[Key, Collection[Key]]) -> list[Key]:
    """Sort resources so that each comes after the resources to which it refers.

    Raises:
        graphlib.CycleError: Resources refer to each other in a cycle, which is the error's second argument.
    """
    keys = sorted(references, key=lambda key: KINDS.index(key.kind))
    graph = {key: [each for each in keys if each in references[key]] for key in keys}
    return list(TopologicalSorter(graph).static_order())


def refusal(key: Key, owner: Owner | None, set_name: str, *, exists: bool, adopts: bool) -> str:
    """Return why a set may not change a resource, or an empty string if it may."""
    if owner is not None and owner.set_name != set_name and not (adopts and set_name):
        advice = "; add --adopt to take it over" if set_name else ""
        return f"{key.kind} {key.name!r} belongs to the set {owner.set_name!r}{advice}"
    if owner is None and exists and set_name and not adopts:
        return f"{key.kind} {key.name!r} exists and belongs to no set; add --adopt to take it over"
    return ""


def steps(
    order: Sequence[Key],
    changed: Collection[Key],
    existing: Collection[Key],
    owners: Mapping[Key, Owner],
    set_name: str,
    *,
    prunes: bool,
) -> list[Step]:
    """Return the steps that save the resources in `order`. With `prunes`, also delete the set's other resources.

    `changed` are the existing resources that differ from their files.
    """
    found: list[Step] = []
    for key in order:
        owner = owners.get(key)
        action = Action.CREATE if key not in existing else Action.UPDATE if key in changed else Action.KEEP
        is_owned = owner is not None and owner.set_name == set_name
        claims = bool(set_name) and (action is not Action.KEEP or not is_owned)
        found.append(Step(action, key, owner.version if owner else 0, claims))
    left = leftover(order, owners, set_name) if prunes else ()
    return [*found, *(Step(Action.DELETE, key, owners[key].version, claims=key in existing) for key in left)]


def leftover(order: Collection[Key], owners: Mapping[Key, Owner], set_name: str) -> list[Key]:
    """Return the set's resources that no longer have a file. Dependents come first."""
    keys = [key for key, owner in owners.items() if set_name and owner.set_name == set_name and key not in order]
    return sorted(keys, key=lambda key: (-KINDS.index(key.kind), key.name))
