"""Finds the faults of a definition whose form is right, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pawl.agent_loop.workflows import expressions
from pawl.agent_loop.workflows.definition import (
    AnyNode,
    MapNode,
    WorkflowDefinition,
    below,
    edges,
    order,
    templates,
)
from pawl.agent_loop.workflows.expressions import DefinitionFault, Names

_RUN: Final = frozenset({"id", "user"})


def faults(definition: WorkflowDefinition, *, names: frozenset[str]) -> list[DefinitionFault]:
    """Return all faults. `names` are the nodes that exist, also those that have faults of their own."""
    found = [*_cycles(definition)]
    for name, node in definition.nodes.items():
        scope: dict[str, frozenset[str] | None] = {"input": _inputs(definition), "nodes": names, "run": _RUN}
        found += _expressions(node, scope, f"nodes.{name}")
    return found


def _inputs(definition: WorkflowDefinition) -> frozenset[str] | None:
    """Return the fields of `input`; None if its schema does not name them."""
    properties: Any = definition.input.get("properties")
    is_open = definition.input.get("additionalProperties", False)
    return None if is_open or not isinstance(properties, dict) else frozenset(properties)


def _expressions(node: AnyNode, scope: dict[str, frozenset[str] | None], path: str) -> Iterator[DefinitionFault]:
    for name, value in templates(node).items():
        used: Names = {**scope, "output": None, "iteration": frozenset()} if name == "repeat.until" else scope
        yield from expressions.check(value, used, f"{path}.{name}")
    inner = {**scope, node.as_: None, "index": frozenset()} if isinstance(node, MapNode) else scope
    for name, each in below(node).items():
        yield from _expressions(each, inner, f"{path}.{name}")


def _cycles(definition: WorkflowDefinition) -> Iterator[DefinitionFault]:
    """Report each group of nodes that need each other."""
    ordered = frozenset(order(definition))
    after: dict[str, set[str]] = {name: set() for name in definition.nodes if name not in ordered}
    for edge in edges(definition):
        if edge.source in after and edge.target in after:
            after[edge.source].add(edge.target)
    reported: set[str] = set()
    for name in sorted(after):
        cycle = [] if name in reported else _path_back(name, after)
        if cycle:
            reported.update(cycle)
            yield DefinitionFault(
                f"nodes.{name}", f"needs itself: {' -> '.join([*cycle, name])}", "use repeat for a loop"
            )


def _path_back(start: str, after: dict[str, set[str]]) -> list[str]:
    """Return a shortest path from a node back to itself; empty if it is on no cycle."""
    paths, seen = [[start]], set()
    for path in paths:
        for target in sorted(after[path[-1]]):
            if target == start:
                return path
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return []
