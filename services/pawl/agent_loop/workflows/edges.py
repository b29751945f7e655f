"""The edges between the nodes of a workflow, and the order that follows from them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

from pawl.agent_loop.workflows import expressions
from pawl.agent_loop.workflows.definition import (
    AnyNode,
    ConditionNode,
    GoTo,
    WorkflowDefinition,
    below,
    templates,
)

EdgeKind: TypeAlias = Literal["after", "then", "else", "go_to", "reference"]
# The kind that remains if two nodes have several edges.
_PRECEDENCE: Final[dict[EdgeKind, int]] = {"go_to": 0, "then": 1, "else": 2, "after": 3, "reference": 4}


class Edge(NamedTuple):
    source: str
    target: str
    kind: EdgeKind


class Incoming(NamedTuple):
    """How a node starts: when its join over `control` allows it, and all sources in `others` have ended.

    `others` are references. If a node has only references, they are its control edges instead.
    """

    control: tuple[Edge, ...]
    others: tuple[Edge, ...]


def references(node: AnyNode) -> frozenset[str]:
    """Return the names of all nodes that a node and the nodes inside it read."""
    found = expressions.references(templates(node))
    return found.union(*(references(each) for each in below(node).values()))


def edges(definition: WorkflowDefinition) -> tuple[Edge, ...]:
    """Return the edges, at most one from one node to another. Nodes that do not exist have no edges.

    The edges of `then`, `else` and `go_to` come before `after` and references, because they may be inactive when the
    others are active.
    """
    found: dict[tuple[str, str], EdgeKind] = {}
    for source, target, kind in sorted(_all_edges(definition), key=lambda edge: _PRECEDENCE[edge.kind]):
        if source in definition.nodes and target in definition.nodes:
            found.setdefault((source, target), kind)
    return tuple(Edge(source, target, kind) for (source, target), kind in sorted(found.items()))


def incoming(definition: WorkflowDefinition) -> dict[str, Incoming]:
    """Return how each node starts. A node without edges starts immediately."""
    found: dict[str, list[Edge]] = {name: [] for name in definition.nodes}
    for edge in edges(definition):
        found[edge.target].append(edge)
    return {name: _incoming(tuple(each)) for name, each in found.items()}


def order(definition: WorkflowDefinition) -> tuple[str, ...]:
    """Return the nodes in topological order, then by name. Nodes on a cycle and behind it are left out."""
    found = edges(definition)
    open_count = dict.fromkeys(definition.nodes, 0)
    after: dict[str, list[str]] = {name: [] for name in definition.nodes}
    for edge in found:
        open_count[edge.target] += 1
        after[edge.source].append(edge.target)
    ready = sorted(name for name, count in open_count.items() if not count)
    ordered = []
    while ready:
        name = heapq.heappop(ready)
        ordered.append(name)
        for target in after[name]:
            open_count[target] -= 1
            if not open_count[target]:
                heapq.heappush(ready, target)
    return tuple(ordered)


def _all_edges(definition: WorkflowDefinition) -> Iterator[Edge]:
    for name, node in definition.nodes.items():
        yield from (Edge(source, name, "after") for source in node.after)
        yield from (Edge(source, name, "reference") for source in references(node))
        if isinstance(node.on_error, GoTo):
            yield Edge(name, node.on_error.go_to, "go_to")
        if isinstance(node, ConditionNode):
            yield from (Edge(name, target, "then") for target in node.then)
            yield from (Edge(name, target, "else") for target in node.else_)


def _incoming(found: tuple[Edge, ...]) -> Incoming:
    control = tuple(edge for edge in found if edge.kind != "reference")
    if not control:
        return Incoming(found, ())
    return Incoming(control, tuple(edge for edge in found if edge.kind == "reference"))
