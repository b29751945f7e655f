"""The edges between the nodes of a workflow, and the resulting order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Final, Literal, NamedTuple, TypeAlias

from pawl.agent_loop.workflows import expressions
from pawl.agent_loop.workflows.definition import AnyNode, ConditionNode, GoTo, WorkflowDefinition, below, templates

EdgeKind: TypeAlias = Literal["go_to", "then", "else", "after", "reference"]
# If two nodes have several edges, only that of the first kind is used: edges of `then`, `else` and `go_to` may be
# inactive when the others are active.
_PRECEDENCE: Final[tuple[EdgeKind, ...]] = ("go_to", "then", "else", "after", "reference")


class Edge(NamedTuple):
    source: str
    target: str
    kind: EdgeKind


class Incoming(NamedTuple):
    """The incoming edges of a node.

    The node starts once its join over `control` is met and all sources in `others` have ended. `control` maps sources
    to kinds of edges. `others` contains references. If a node has only references, they are its control edges instead.
    """

    control: Mapping[str, EdgeKind]
    others: tuple[str, ...]


def references(node: AnyNode) -> frozenset[str]:
    """Return the names of all nodes to which a node, or any node inside it, refers."""
    found = expressions.references(templates(node))
    return found.union(*(references(each) for each in below(node).values()))


def incoming(definition: WorkflowDefinition) -> dict[str, Incoming]:
    """Return the incoming edges of each node, sorted by source, at most one from each source.

    A node without edges starts immediately. References to unknown nodes are ignored.
    """
    by_kind: dict[EdgeKind, list[tuple[str, str]]] = {kind: [] for kind in _PRECEDENCE}
    for name, node in definition.nodes.items():
        for kind, source, target in _edges(name, node):
            by_kind[kind].append((source, target))
    found: dict[str, dict[str, EdgeKind]] = {name: {} for name in definition.nodes}
    for kind, pairs in by_kind.items():
        for source, target in pairs:
            if source in found and target in found:
                found[target].setdefault(source, kind)
    return {name: _incoming(dict(sorted(each.items()))) for name, each in found.items()}


def order(found: Mapping[str, Incoming]) -> tuple[str, ...]:
    """Return the nodes in topological order. Nodes that could come next are taken in alphabetical order.

    Raises:
        graphlib.CycleError: The error's second argument is a cycle, from source to target.
    """
    sorter = TopologicalSorter({name: (*each.control, *each.others) for name, each in found.items()})
    sorter.prepare()
    ordered: list[str] = []
    ready = sorted(sorter.get_ready())
    while ready:
        ordered.append(heapq.heappop(ready))
        sorter.done(ordered[-1])
        for name in sorter.get_ready():
            heapq.heappush(ready, name)
    return tuple(ordered)


def edges(found: Mapping[str, Incoming]) -> list[Edge]:
    """Return all edges, sorted by source and target."""
    control = (Edge(source, target, kind) for target, each in found.items() for source, kind in each.control.items())
    others = (Edge(source, target, "reference") for target, each in found.items() for source in each.others)
    return sorted([*control, *others])


def _edges(name: str, node: AnyNode) -> Iterator[tuple[EdgeKind, str, str]]:
    """Yield the kind, source and target of each edge that a node defines."""
    yield from (("after", source, name) for source in node.after)
    yield from (("reference", source, name) for source in references(node))
    if isinstance(node.on_error, GoTo):
        yield "go_to", name, node.on_error.go_to
    if isinstance(node, ConditionNode):
        yield from (("then", name, target) for target in node.then)
        yield from (("else", name, target) for target in node.else_)


def _incoming(found: dict[str, EdgeKind]) -> Incoming:
    control = {source: kind for source, kind in found.items() if kind != "reference"}
    return (
        Incoming(control, tuple(source for source in found if source not in control))
        if control
        else Incoming(found, ())
    )
