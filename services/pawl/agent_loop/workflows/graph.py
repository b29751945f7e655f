"""Decides which nodes start, end or are skipped, from the states of all nodes. Does not evaluate expressions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows.cursor import (
    CANCELLED,
    ENDED,
    MESSAGE_CHARACTERS_MAX,
    NODE_TIMEOUT,
    NodeRecord,
    NodeState,
    WorkflowCursor,
)
from pawl.agent_loop.workflows.definition import (
    AnyNode,
    CallNode,
    ConditionNode,
    HumanNode,
    MapNode,
    OutputNode,
    ParallelNode,
    Quorum,
    TimedNode,
    WaitNode,
    WorkflowDefinition,
)
from pawl.agent_loop.workflows.edges import EdgeKind, incoming, order

_RETRY_SECONDS_MAX: Final = 3600.0
# Errors after which a node is not retried.
_FINAL: Final = frozenset(
    {
        *("REJECTED", "OUTCOME_UNKNOWN", "NOT_STOPPED", "NOT_ALLOWED", "PERMISSION_DENIED", "INVALID_ARGUMENTS"),
        *("TOOL_NOT_FOUND", "WORKFLOW_NOT_FOUND", "EXPRESSION_FAILED", "REPEAT_LIMIT", "CANCELLED"),
        *("AGENT_CANCELLED", "BUDGET_EXHAUSTED"),
    }
)
# A parallel node or a map stops its open calls because its outcome no longer depends on them.
DECIDED: Final = "DECIDED"
# Kinds of nodes without a call.
_WITHOUT_CALL: Final = (ConditionNode, OutputNode, ParallelNode, WaitNode)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A node in its graph. `control` and `others` are as in `edges.Incoming`.

    `parent` is the parallel node that contains this branch, and `item` is the item's index in the map's list.
    """

    number: int
    path: str
    node: AnyNode
    control: tuple[tuple[int, EdgeKind], ...] = ()
    others: tuple[int, ...] = ()
    parent: int | None = None
    branches: tuple[int, ...] = ()
    item: int | None = None


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes of a workflow, parents before their branches. A chunk of the map `mapping` has one node per item."""

    definition: WorkflowDefinition
    steps: tuple[Step, ...]
    concurrency: int
    mapping: MapNode | None = None
    # The graph that contains the map.
    outer: Graph | None = None

    def step(self, path: str) -> Step | None:
        return next((step for step in self.steps if step.path == path), None)


def of_definition(definition: WorkflowDefinition) -> Graph:
    steps: list[Step] = []
    found = incoming(definition)
    for name in order(found):
        _add_branches(steps, _add(steps, name, definition.nodes[name], None))
    numbers = {step.path: step.number for step in steps}
    for name, edges in found.items():
        number = numbers[name]
        steps[number] = replace(
            steps[number],
            control=tuple((numbers[source], kind) for source, kind in edges.control.items()),
            others=tuple(numbers[source] for source in edges.others),
        )
    return Graph(definition=definition, steps=tuple(steps), concurrency=definition.concurrency)


def of_items(graph: Graph, path: str, indexes: range, concurrency: int) -> Graph:
    """Return the graph of some items of the map at `path`."""
    found = graph.step(path)
    if found is None or not isinstance(found.node, MapNode):
        raise ValueError(f"{path} is not a map")
    node = found.node.do
    steps = tuple(Step(number=n, path=f"{path}[{i}]", node=node, item=i) for n, i in enumerate(indexes))
    return Graph(definition=graph.definition, steps=steps, concurrency=concurrency, mapping=found.node, outer=graph)


def _add(steps: list[Step], path: str, node: AnyNode, parent: int | None) -> int:
    steps.append(Step(number=len(steps), path=path, node=node, parent=parent))
    return len(steps) - 1


def _add_branches(steps: list[Step], number: int) -> None:
    """Add the branches of a node, and the branches inside them."""
    path, node = steps[number].path, steps[number].node
    if not isinstance(node, ParallelNode):
        return
    branches = tuple(_add(steps, f"{path}.{name}", node.branches[name], number) for name in sorted(node.branches))
    steps[number] = replace(steps[number], branches=branches)
    for branch in branches:
        _add_branches(steps, branch)


def ready(graph: Graph, cursor: WorkflowCursor, checking: Collection[int], now_ms: int) -> tuple[Step, ...]:
    """Return the nodes to start now, in order.

    At most `concurrency` nodes with calls are open. This includes nodes that await a retry, and nodes in `checking`,
    whose calls the registry is checking.
    """
    held = {step.number for step in graph.steps if _holds_slot(step, cursor.nodes.get(step.number))}
    free = graph.concurrency - len(held.union(checking))
    found = []
    for step in graph.steps:
        if step.number in checking or not is_ready(graph, cursor, step, now_ms):
            continue
        if isinstance(step.node, _WITHOUT_CALL):
            found.append(step)
        elif step.number in cursor.nodes or free > 0:
            free -= step.number not in cursor.nodes
            found.append(step)
    return tuple(found)


def open_maps(graph: Graph, cursor: WorkflowCursor) -> tuple[Step, ...]:
    """Return the maps that still have items to start."""
    return tuple(
        step
        for step in graph.steps
        if (record := cursor.nodes.get(step.number)) is not None
        and record.state is NodeState.RUNNING
        and not record.stop
        and record.chunks < cursors.chunk_count(record.items or 0)
    )


def _holds_slot(step: Step, record: NodeRecord | None) -> bool:
    return record is not None and record.is_open and not isinstance(step.node, _WITHOUT_CALL)


def is_ready(graph: Graph, cursor: WorkflowCursor, step: Step, now_ms: int) -> bool:
    """Return whether a node may start its next call now."""
    record = cursor.nodes.get(step.number)
    if record is not None:
        return record.state is NodeState.RETRYING and not record.stop and (record.due_ms or 0) <= now_ms
    if step.parent is not None:
        parent = cursor.nodes.get(step.parent)
        return parent is not None and parent.state is NodeState.RUNNING and not parent.stop
    return _start(graph, cursor, step) == "ready"


def advanced(graph: Graph, cursor: WorkflowCursor, with_calls: Collection[int], now_ms: int) -> WorkflowCursor:
    """Return the cursor after all changes that follow from the time and the states of other nodes.

    `with_calls` contains the nodes with an open call. A node that is being stopped ends once its call has ended.
    """
    while True:
        changed = {}
        for step in graph.steps:
            record = cursor.nodes.get(step.number)
            after = _next(graph, cursor, step, with_calls, now_ms)
            if after is not None and after is not record:
                changed[step.number] = after
        if not changed:
            return cursor
        cursor = cursor.with_nodes(changed)


def after_call(step: Step, record: NodeRecord, *, until: bool | None) -> NodeRecord:
    """Return the state of a node after its call has ended. After a success, `until` is the value of `repeat.until`."""
    node, end_ms = step.node, record.end_ms or 0
    if not record.reason:
        repeat = node.repeat if isinstance(node, CallNode) else None
        if until is None or until or record.stop or repeat is None:
            return replace(record, state=NodeState.SUCCEEDED, stop="")
        if record.iteration >= repeat.max:
            message = f"The condition of repeat.until was not met in {repeat.max} iterations."
            return failed(record, end_ms, "REPEAT_LIMIT", message)
        following = record.iteration + 1
        return NodeRecord(state=NodeState.RETRYING, iteration=following, start_ms=record.start_ms, due_ms=end_ms)
    if record.stop == CANCELLED:
        return replace(record, state=NodeState.CANCELLED, reason="", stop="")
    if record.stop == NODE_TIMEOUT and record.reason not in {"OUTCOME_UNKNOWN", "NOT_STOPPED"}:
        record = replace(record, reason=record.stop, message="The node exceeded its timeout.")
    if record.reason == "EXPIRED" and isinstance(node, HumanNode) and node.default is not UNSET:
        return replace(record, state=NodeState.SUCCEEDED, value=True, reason="", stop="")
    retry = node.retry if isinstance(node, CallNode) else None
    if retry is None or record.attempt >= retry.attempts or record.reason in _FINAL:
        return replace(record, state=NodeState.FAILED, stop="")
    delay = min(_RETRY_SECONDS_MAX, retry.delay_seconds * retry.factor ** (record.attempt - 1))
    return replace(
        record,
        state=NodeState.RETRYING,
        attempt=record.attempt + 1,
        due_ms=end_ms + round(delay * 1000),
        end_ms=None,
        message="",
        stop="",
    )


def failed(record: NodeRecord, now_ms: int, reason: str, message: str) -> NodeRecord:
    return replace(
        record,
        state=NodeState.FAILED,
        end_ms=now_ms,
        reason=reason,
        message=message[:MESSAGE_CHARACTERS_MAX],
        stop="",
        due_ms=None,
    )


def next_time(graph: Graph, cursor: WorkflowCursor) -> int | None:
    """Return when the next wait, delay or timeout ends, in milliseconds, or None if there is none."""
    times = []
    for step in graph.steps:
        record = cursor.nodes.get(step.number)
        if record is None or not record.is_open or record.stop:
            continue
        if record.due_ms is not None and not (cursor.is_paused and record.state is NodeState.RETRYING):
            times.append(record.due_ms)
        limit = _timeout_ms(step, record)
        times += [] if limit is None else [limit]
    return min(times, default=None)


def first_failure(graph: Graph, cursor: WorkflowCursor, failures_max: int) -> Step | None:
    """Return the node whose failure fails the run: the first to fail after `failures_max` others."""
    found = [step for step in graph.steps if _fails_run(step, cursor.nodes.get(step.number))]
    found.sort(key=lambda step: cursor.nodes[step.number].end_ms or 0)
    return found[failures_max] if len(found) > failures_max else None


def has_ended(graph: Graph, cursor: WorkflowCursor) -> bool:
    return all(is_ended(cursor, step.number) for step in graph.steps)


def is_ended(cursor: WorkflowCursor, number: int) -> bool:
    record = cursor.nodes.get(number)
    return record is not None and record.state in ENDED


def _fails_run(step: Step, record: NodeRecord | None) -> bool:
    is_failed = record is not None and record.state is NodeState.FAILED
    return is_failed and step.parent is None and step.node.on_error in {"fail", "undo"}


def _next(
    graph: Graph, cursor: WorkflowCursor, step: Step, with_calls: Collection[int], now_ms: int
) -> NodeRecord | None:
    record = cursor.nodes.get(step.number)
    if record is None:
        return _unstarted(graph, cursor, step, now_ms)
    if not record.is_open or record.end_ms is not None:
        return record
    if step.parent is not None and not record.stop and cursor.nodes[step.parent].stop:
        record = replace(record, stop=CANCELLED)
    if not record.stop and (limit := _timeout_ms(step, record)) is not None and limit <= now_ms:
        record = replace(record, stop=NODE_TIMEOUT)
    if step.branches:
        return _parallel(graph, cursor, step, record, now_ms)
    if record.stop and step.number not in with_calls:
        if record.stop == CANCELLED:
            return replace(record, state=NodeState.CANCELLED, end_ms=now_ms, due_ms=None, stop="", reason="")
        return failed(record, now_ms, record.stop, "The node exceeded its timeout.")
    if isinstance(step.node, WaitNode) and record.due_ms is not None and record.due_ms <= now_ms and not record.stop:
        return replace(record, state=NodeState.SUCCEEDED, end_ms=max(record.start_ms, record.due_ms), due_ms=None)
    return record


def _unstarted(graph: Graph, cursor: WorkflowCursor, step: Step, now_ms: int) -> NodeRecord | None:
    if step.parent is not None:
        parent = cursor.nodes.get(step.parent)
        if parent is None or (parent.state is NodeState.RUNNING and not parent.stop):
            return None
        is_skipped = parent.state is NodeState.SKIPPED
        state = NodeState.SKIPPED if is_skipped else NodeState.CANCELLED
        return NodeRecord(state=state, start_ms=now_ms, end_ms=now_ms)
    if _start(graph, cursor, step) != "skip":
        return None
    return NodeRecord(state=NodeState.SKIPPED, start_ms=now_ms, end_ms=now_ms)


def _parallel(graph: Graph, cursor: WorkflowCursor, step: Step, record: NodeRecord, now_ms: int) -> NodeRecord:
    branches = [cursor.nodes.get(number) for number in step.branches]
    succeeded = sum(branch is not None and branch.state is NodeState.SUCCEEDED for branch in branches)
    open_count = sum(branch is None or branch.state not in ENDED for branch in branches)
    needed = _count(step.node.require, len(branches)) if isinstance(step.node, ParallelNode) else 0
    if not record.stop and (succeeded >= needed or succeeded + open_count < needed):
        # Stop the other branches. The outcome depends only on the branches.
        record = replace(record, stop=DECIDED) if open_count else record
    if open_count:
        return record
    if succeeded >= needed:
        return replace(record, state=NodeState.SUCCEEDED, end_ms=now_ms, stop="")
    if record.stop == CANCELLED:
        return replace(record, state=NodeState.CANCELLED, end_ms=now_ms, stop="")
    if record.stop == NODE_TIMEOUT:
        return failed(record, now_ms, NODE_TIMEOUT, "The node exceeded its timeout.")
    failures = [
        (branch.end_ms or 0, number, branch.reason)
        for number, branch in zip(step.branches, branches, strict=True)
        if branch is not None and branch.state is NodeState.FAILED
    ]
    _, number, reason = max(failures)
    return failed(record, now_ms, reason, f"Node {graph.steps[number].path} failed.")


def _start(graph: Graph, cursor: WorkflowCursor, step: Step) -> Literal["ready", "skip", "wait"]:
    edges = [_edge(graph, cursor, source, kind) for source, kind in step.control]
    active, undecided = edges.count(True), edges.count(None)
    if step.node.join == "all":
        starts, never = not undecided and (active > 0 or not edges), not undecided and not active and bool(edges)
    else:
        needed = _count(step.node.join, len(edges)) if edges else 0
        starts, never = active >= needed, active + undecided < needed
    if never:
        return "skip"
    return "ready" if starts and all(is_ended(cursor, source) for source in step.others) else "wait"


def _edge(graph: Graph, cursor: WorkflowCursor, source: int, kind: EdgeKind) -> bool | None:
    """Return whether an edge is active, or None if its source has not ended."""
    record, node = cursor.nodes.get(source), graph.steps[source].node
    if record is None or record.state not in ENDED:
        return None
    if kind == "go_to":
        return record.state is NodeState.FAILED
    if record.state is NodeState.FAILED:
        return node.on_error == "continue" and kind not in {"then", "else"}
    if record.state is not NodeState.SUCCEEDED:
        return False
    return record.value is (kind == "then") if kind in {"then", "else"} else True


def _count(quorum: Quorum, most: int) -> int:
    return most if quorum == "all" else 1 if quorum == "any" else quorum


def _timeout_ms(step: Step, record: NodeRecord) -> int | None:
    node = step.node
    if not isinstance(node, TimedNode) or node.timeout_seconds is None or record.state is not NodeState.RUNNING:
        return None
    return record.start_ms + round(node.timeout_seconds * 1000) if record.end_ms is None else None
