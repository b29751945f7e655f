"""The state of a workflow run's program: how far each node has come. Outputs stay in the calls.

The id of a node's call contains the node's number in its graph, so that the state can be updated from the calls alone,
before the definition has been read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.chassis.ids import CallId, RunId
from pawl.values import CallState

# The message of an error without a call is truncated to this length.
MESSAGE_CHARACTERS_MAX: Final = 120
CANCELLED: Final = "CANCELLED"
NODE_TIMEOUT: Final = "NODE_TIMEOUT"

_CALL_ID: Final = re.compile(r"node_([0-9a-f]{24})_(\d+)_(\d+)_(\d+)_(\d+)", re.ASCII)


class NodeState(StrEnum):
    """A node that is not in the cursor has not started. RETRYING waits for the start of its next call."""

    RUNNING = "R"
    RETRYING = "T"
    SUCCEEDED = "S"
    FAILED = "F"
    SKIPPED = "K"
    CANCELLED = "C"


ENDED: Final = frozenset({NodeState.SUCCEEDED, NodeState.FAILED, NodeState.SKIPPED, NodeState.CANCELLED})


class NodeKey(NamedTuple):
    """Identifies a call of a node. `chunk` counts the chunks of a map."""

    iteration: int
    attempt: int
    chunk: int


_NAMES: Final = {
    "state": "s",
    "iteration": "i",
    "attempt": "a",
    "start_ms": "b",
    "end_ms": "e",
    "due_ms": "d",
    "reason": "r",
    "message": "m",
    "stop": "x",
    "value": "v",
    "items": "n",
    "chunks": "c",
    "failed_items": "f",
    "event": "p",
    "origin": "o",
}


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename=_NAMES):
    """A node that has started or ended. Times are milliseconds since the start of the run.

    `start_ms` is the start of the current attempt, and `due_ms` is when a RETRYING or waiting node continues. A RUNNING
    node with an `end_ms` has ended its call, with `reason` if it failed; the program then decides what follows. `stop`
    is why the node is being stopped. `value` is the output of a condition, or true if a person's answer is the default.
    A map has processed `chunks` chunks of its `items`; `failed_items` items have failed. `event` is the number of the
    event that ended a wait. `origin` is the position, counted from 1, of the run with the node's calls in
    `WorkflowCursor.origins`; 0 if it is this run.
    """

    state: NodeState
    iteration: int = 1
    attempt: int = 1
    start_ms: int = 0
    end_ms: int | None = None
    due_ms: int | None = None
    reason: str = ""
    # Only for an error without a call.
    message: str = ""
    stop: str = ""
    value: bool | None = None
    # None unless the node is a map.
    items: int | None = None
    chunks: int = 0
    failed_items: int = 0
    event: int = 0
    origin: int = 0

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.iteration, self.attempt, self.chunks)

    @property
    def is_open(self) -> bool:
        return self.state in {NodeState.RUNNING, NodeState.RETRYING}


class WorkflowCursor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="workflow"
):
    """The state of a workflow run. `nodes` are the nodes that have started or ended, by their number in the graph.

    `events` are the events that no node has taken: their names and numbers, oldest first. `failure` is the reason and
    message with which the run fails once its calls have ended and, unless it is part of a map, its effects are undone
    (`is_undone`).
    """

    start_time: float = 0.0
    nodes: Mapping[int, NodeRecord] = {}
    events: tuple[tuple[str, int], ...] = ()
    events_received: int = 0
    is_paused: bool = False
    # The runs whose finished nodes this run reuses.
    origins: tuple[RunId, ...] = ()
    failure: tuple[str, str] | None = None
    is_undone: bool = False

    def with_nodes(self, changed: Mapping[int, NodeRecord]) -> WorkflowCursor:
        return replace(self, nodes={**self.nodes, **changed}) if changed else self

    def milliseconds(self, time: float) -> int:
        return round((time - self.start_time) * 1000)

    def run_id(self, record: NodeRecord, own: RunId) -> RunId:
        """Return the run that has the calls of a node."""
        return self.origins[record.origin - 1] if record.origin else own


def call_id(run_id: RunId, number: int, key: NodeKey) -> CallId:
    return CallId(f"node_{_digest(run_id)}_{number}_{key.iteration}_{key.attempt}_{key.chunk}")


def event_call_id(run_id: RunId, number: int) -> CallId:
    """Return the id of the call that holds the payload of the run's event `number`, counted from 1."""
    return CallId(f"event_{_digest(run_id)}_{number}")


def undo_call_id(run_id: RunId) -> CallId:
    """Return the id of the call whose child run undoes the effects of a run that fails."""
    return CallId(f"undo_{_digest(run_id)}")


@lru_cache(maxsize=4096)
def parsed(call: CallId) -> tuple[int, NodeKey] | None:
    """Return the number and key of the node that made a call; None for another call."""
    found = _CALL_ID.fullmatch(call)
    return None if found is None else (int(found[2]), NodeKey(int(found[3]), int(found[4]), int(found[5])))


def recorded(cursor: WorkflowCursor, run_id: RunId, calls: Iterable[Call]) -> WorkflowCursor:
    """Return the cursor updated with these calls of the run. Idempotent."""
    changed: dict[int, NodeRecord] = {}
    for call in calls:
        if call.settled and call.call_id == undo_call_id(run_id) and not cursor.is_undone:
            cursor = replace(cursor, is_undone=True, failure=_with_undo(cursor.failure, call))
        found = parsed(call.call_id) if call.run_id == run_id else None
        if found is None:
            continue
        number, key = found
        known = changed.get(number, cursor.nodes.get(number))
        after = _with_call(cursor, known, key, call)
        if after is not known and after is not None:
            changed[number] = after
    return cursor.with_nodes(changed)


def _with_call(cursor: WorkflowCursor, known: NodeRecord | None, key: NodeKey, call: Call) -> NodeRecord | None:
    if known is not None and (known.key > key or known.state in ENDED):
        return known
    if known is None or known.state is NodeState.RETRYING or known.key < key:
        known = NodeRecord(
            state=NodeState.RUNNING,
            iteration=key.iteration,
            attempt=key.attempt,
            start_ms=cursor.milliseconds(call.create_time or cursor.start_time),
        )
    if not call.settled or known.end_ms is not None:
        return known
    end_ms = cursor.milliseconds(call.end_time or cursor.start_time)
    if call.state is not CallState.SUCCEEDED:
        return replace(known, end_ms=end_ms, reason=reason_of(call))
    if known.items is None:
        return replace(known, end_ms=end_ms)
    return replace(known, chunks=known.chunks + 1, failed_items=known.failed_items + _failed_items(call))


def _with_undo(failure: tuple[str, str] | None, call: Call) -> tuple[str, str] | None:
    """Return the failure of a run after its undo has ended. The message names an undo that failed."""
    if failure is None or call.state is CallState.SUCCEEDED:
        return failure
    return failure[0], f"{failure[1]} Not everything was undone: run {call.child_run_id} ended with {reason_of(call)}."


def reason_of(call: Call) -> str:
    """Return why a call did not succeed."""
    if call.state is CallState.FAILED and call.result is not None and call.result.error_reason:
        return call.result.error_reason
    return call.state.name


class ChunkOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a run that processes items of a map. A failed item's output is null."""

    outputs: list[msgspec.Raw]
    failed: int = 0


def _failed_items(call: Call) -> int:
    return 0 if call.result is None else msgspec.json.decode(call.result.content_json, type=ChunkOutput).failed


@lru_cache(maxsize=1024)
def _digest(run_id: RunId) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:24]
