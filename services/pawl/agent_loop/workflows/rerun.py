"""Decides which finished nodes of a run a new run reuses (WorkflowService.RerunFrom)."""

from __future__ import annotations

from typing import Final, NamedTuple

from pawl.agent_loop.workflows.cursor import NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import OutputNode
from pawl.agent_loop.workflows.graph import Graph
from pawl.chassis.ids import RunId

_REUSABLE: Final = frozenset({NodeState.SUCCEEDED, NodeState.SKIPPED})


class Rerun(NamedTuple):
    """The initial cursor of the new run, and the numbers of the nodes that run again."""

    start: WorkflowCursor
    again: frozenset[int]


def rerun(graph: Graph, cursor: WorkflowCursor, run_id: RunId, number: int) -> Rerun:
    """Return how to run node `number` of an ended run again, with all nodes that depend on it.

    A node is reused if it succeeded or was skipped, and depends on no node that runs again. A branch depends on the
    nodes before its parallel node, but not on the other branches. An output node always runs again, because it sets the
    output of the new run; the nodes after it do not, because its value is the same.
    """
    again, opened = {number}, _parents(graph, number)
    for step in graph.steps:
        sources = {source for source, _ in step.control} | set(step.others)
        record = cursor.nodes.get(step.number)
        if step.number in again:
            continue
        if step.parent in again or sources & (again | opened):
            again.add(step.number)
        elif step.parent is not None and step.parent not in opened:
            continue  # Its parallel node is reused with all branches.
        elif record is None or record.state not in _REUSABLE:
            (opened if step.branches else again).add(step.number)
    again |= opened
    outputs = {step.number for step in graph.steps if isinstance(step.node, OutputNode)}
    kept = {
        node
        for node, record in cursor.nodes.items()
        if node not in again and not (node in outputs and record.state is NodeState.SUCCEEDED)
    }
    return Rerun(cursor.reused(kept, run_id), frozenset(again))


def _parents(graph: Graph, number: int) -> set[int]:
    """Return the parallel nodes that contain a node. They run again, but reuse their other branches."""
    found, parent = set(), graph.steps[number].parent
    while parent is not None:
        found.add(parent)
        parent = graph.steps[parent].parent
    return found
