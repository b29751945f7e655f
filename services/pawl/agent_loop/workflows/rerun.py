"""Decides which finished nodes a new run reuses from an earlier run (WorkflowService.RerunFrom)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from pawl.agent_loop.workflows import expressions
from pawl.agent_loop.workflows.cursor import NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import OutputNode, templates
from pawl.agent_loop.workflows.graph import Graph
from pawl.chassis.ids import RunId

_REUSABLE: Final = frozenset({NodeState.SUCCEEDED, NodeState.SKIPPED})


class Rerun(NamedTuple):
    """The initial cursor of the new run, and the numbers of the nodes that run again."""

    start: WorkflowCursor
    again: frozenset[int]


def rerun(
    graph: Graph, cursor: WorkflowCursor, run_id: RunId, number: int, undone: Collection[int] = frozenset()
) -> Rerun:
    """Return how to rerun node `number` of an ended run, together with all nodes that depend on it.

    A node is reused if it succeeded or was skipped, and depends on no node that runs again. A branch depends on the
    nodes before its parallel node, but not on the other branches. An output node always runs again, because it sets the
    output of the new run. The nodes after it do not, because its value is the same.

    Nodes with `undone` effects run again. If a wait runs again, nodes that use its token also run again, because the
    new wait has a new token.
    """
    chosen = {number, *undone}
    while True:
        again = _with_dependents(graph, cursor, chosen)
        with_old_token = _with_tokens(graph, cursor, again) - again
        if not with_old_token:
            break
        chosen |= with_old_token
    outputs = {step.number for step in graph.steps if isinstance(step.node, OutputNode)}
    reused = {
        node
        for node, record in cursor.nodes.items()
        if node not in again and not (node in outputs and record.state is NodeState.SUCCEEDED)
    }
    return Rerun(cursor.reused(reused, run_id), again)


def _with_dependents(graph: Graph, cursor: WorkflowCursor, chosen: Collection[int]) -> frozenset[int]:
    """Return the chosen nodes together with the nodes that must also run again."""
    again, opened = set(chosen), set[int]().union(*(_parents(graph, number) for number in chosen))
    for step in graph.steps:
        sources = {source for source, _ in step.control} | set(step.others)
        record = cursor.nodes.get(step.number)
        if step.number in again:
            continue
        if step.parent in again or sources & (again | opened):
            again.add(step.number)
        elif step.parent is not None and step.parent not in opened:
            continue  # The parallel node that contains it is reused with all branches.
        elif record is None or record.state not in _REUSABLE:
            (opened if step.branches else again).add(step.number)
    return frozenset(again | opened)


def _with_tokens(graph: Graph, cursor: WorkflowCursor, again: Collection[int]) -> frozenset[int]:
    """Return the nodes that succeeded and used the tokens of these nodes."""
    waits = graph.definition.waits.intersection(graph.steps[number].path for number in again)
    using = {step.number for step in graph.steps if expressions.token_names(templates(step.node), waits)}
    return frozenset(using & _succeeded(cursor))


def _succeeded(cursor: WorkflowCursor) -> frozenset[int]:
    return frozenset(number for number, record in cursor.nodes.items() if record.state is NodeState.SUCCEEDED)


def _parents(graph: Graph, number: int) -> set[int]:
    """Return the parallel nodes that contain a node. They run again, but their other branches are reused."""
    found, parent = set(), graph.steps[number].parent
    while parent is not None:
        found.add(parent)
        parent = graph.steps[parent].parent
    return found
