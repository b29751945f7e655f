"""The state of a workflow run's program: the progress of each node. Outputs are stored in the calls, not here.

The id of a node's call contains the node's number in its graph. The state can therefore be updated from the calls
alone, before the definition has been read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call
from pawl.chassis.ids import CallId, RunId
from pawl.values import REPEATABLE, CallState

# The message of an error without a call is truncated to this length, and omitted once all messages exceed the limit.
MESSAGE_CHARACTERS_MAX: Final = 120
_MESSAGES_CHARACTERS_MAX: Final = 2400
_OMITTED: Final = "..."
_REASON_CHARACTERS_MAX: Final = 64
# Maximum number of a map's items per child run.
CHUNK_ITEMS_MAX: Final = 50
CANCELLED: Final = "CANCELLED"
NODE_TIMEOUT: Final = "NODE_TIMEOUT"

_CALL_ID: Final = re.compile(r"node_([0-9a-f]{24})_(\d+)_(\d+)_(\d+)_(\d+)", re.ASCII)


class NodeState(StrEnum):
    """A node that is not in the cursor has not started. A RETRYING node is waiting for its next call."""

    RUNNING = "RUNNING"
    RETRYING = "RETRYING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"
    CANCELLED = "CANCELLED"


ENDED: Final = frozenset({NodeState.SUCCEEDED, NodeState.FAILED, NodeState.SKIPPED, NodeState.CANCELLED})


class NodeKey(NamedTuple):
    """The key of a node's call. `chunk` is the number of a map's chunk, counted from 0."""

    iteration: int
    attempt: int
    chunk: int


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a node that has started or ended. Times are milliseconds since the start of the run.

    `start_ms` is the start of the current attempt. A RETRYING or waiting node continues at `due_ms`. If a RUNNING node
    has an `end_ms`, its call has ended (with `reason` if it failed), and the program decides what happens next. `stop`
    is the reason why the node is being stopped. `value` is the output of a condition, or true if a person's answer is
    the default. A map has started `chunks` chunks of its `items`, and `open_chunks` are open. `failed_items` items have
    failed, and at most `tolerate` may fail. `chunk` is the chunk that failed the map. `event` is the number of the
    event that ended a wait. `origin` is the position in `WorkflowCursor.origins`, counted from 1, of the run that made
    the node's calls. It is 0 for this run.
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
    tolerate: int = 0
    chunks: int = 0
    open_chunks: tuple[int, ...] = ()
    failed_items: int = 0
    chunk: int = 0
    event: int = 0
    origin: int = 0

    @property
    def key(self) -> NodeKey:
        return NodeKey(self.iteration, self.attempt, self.chunk)

    @property
    def is_open(self) -> bool:
        return self.state in {NodeState.RUNNING, NodeState.RETRYING}


class WorkflowCursor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="workflow"
):
    """The state of a workflow run. `nodes` maps numbers in the graph to the nodes that have started or ended.

    `events` contains the names and numbers of the events that no node has consumed, oldest first. `failure` is the
    reason and message with which the run fails once its calls have ended and, unless it is part of a map, its effects
    are undone (`is_undone`).
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
        if not changed:
            return self
        nodes = {**self.nodes, **changed}
        if any(record.message for record in changed.values()):
            left = _MESSAGES_CHARACTERS_MAX - sum(len(record.message) for record in nodes.values())
            for number in changed if left < 0 else ():
                if nodes[number].message:
                    nodes[number] = replace(nodes[number], message=_OMITTED)
        return replace(self, nodes=nodes)

    def milliseconds(self, time: float) -> int:
        return round((time - self.start_time) * 1000)

    def reused(self, numbers: Collection[int], run_id: RunId) -> WorkflowCursor:
        """Return the initial cursor of a run that reuses these nodes of the run `run_id`."""
        records = {number: record for number, record in self.nodes.items() if number in numbers}
        used = sorted({record.origin for record in records.values()} | {0})
        # Times are relative to the start of a run.
        nodes = {
            number: replace(record, origin=used.index(record.origin) + 1, start_ms=0, end_ms=0)
            for number, record in records.items()
        }
        return WorkflowCursor(nodes=nodes, origins=tuple((run_id, *self.origins)[origin] for origin in used))

    def run_id(self, record: NodeRecord, own: RunId) -> RunId:
        """Return the run that made a node's calls."""
        return self.origins[record.origin - 1] if record.origin else own


def call_id(run_id: RunId, number: int, key: NodeKey) -> CallId:
    return CallId(f"node_{_digest(run_id)}_{number}_{key.iteration}_{key.attempt}_{key.chunk}")


def event_call_id(run_id: RunId, number: int) -> CallId:
    """Return the id of the call that holds the payload of the run's event `number`, counted from 1."""
    return CallId(f"event_{_digest(run_id)}_{number}")


def undo_call_id(run_id: RunId) -> CallId:
    """Return the id of the call whose child run undoes the effects of a failing run."""
    return CallId(f"undo_{_digest(run_id)}")


@lru_cache(maxsize=4096)
def parsed(call: CallId) -> tuple[int, NodeKey] | None:
    """Return the number and key of the node that made a call, or None for other calls."""
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
    if known is not None and known.items is not None:
        return known if known.state in ENDED else _with_chunk(known, key.chunk, call)
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
    return replace(known, end_ms=end_ms, reason="" if call.state is CallState.SUCCEEDED else reason_of(call))


def _with_chunk(known: NodeRecord, number: int, call: Call) -> NodeRecord:
    """Return a map's state, updated with the call of a chunk."""
    if number >= known.chunks:
        opened = (*known.open_chunks, *range(known.chunks, number + 1))
        known = replace(known, chunks=number + 1, open_chunks=opened)
    if not call.settled or number not in known.open_chunks:
        return known
    known = replace(known, open_chunks=tuple(each for each in known.open_chunks if each != number))
    if known.reason:
        return known
    if call.state is not CallState.SUCCEEDED:
        return replace(known, reason=reason_of(call), chunk=number)
    found = ChunkOutput() if call.result is None else msgspec.json.decode(call.result.content_json, type=ChunkOutput)
    known = replace(known, failed_items=known.failed_items + found.failed)
    if known.failed_items <= known.tolerate:
        return known
    # Each concurrent chunk was allowed all the failures that were left when it started.
    message = f"{known.failed_items} items failed; at most {known.tolerate} may fail."
    return replace(known, reason=found.reason or "MAP_FAILED", message=message, chunk=number)


def _with_undo(failure: tuple[str, str] | None, call: Call) -> tuple[str, str] | None:
    """Return the failure of a run whose undo has ended. If the undo failed, the message reports that too."""
    if failure is None or call.state is CallState.SUCCEEDED:
        return failure
    return failure[0], f"{failure[1]} Not everything was undone: run {call.child_run_id} ended with {reason_of(call)}."


def reason_of(call: Call) -> str:
    """Return why a call did not succeed."""
    if call.state is CallState.FAILED and call.result is not None and call.result.error_reason:
        return call.result.error_reason[:_REASON_CHARACTERS_MAX]
    # The call may be repeated, so its node may be retried.
    is_safe = call.state is CallState.OUTCOME_UNKNOWN and call.effect_class in REPEATABLE
    return "TOOL_ERROR" if is_safe else call.state.name


class ChunkOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The output of a run that processes items of a map.

    The output of a failed item is null. `reason` explains why one of the items failed.
    """

    outputs: list[msgspec.Raw] = []
    failed: int = 0
    reason: str = ""


def chunk_count(items: int) -> int:
    return -(-items // CHUNK_ITEMS_MAX)


def chunk_items(items: int, number: int) -> range:
    """Return the indexes of a chunk's items. All chunks are about equally large."""
    count = chunk_count(items)
    return range(number * items // count, (number + 1) * items // count)


@lru_cache(maxsize=1024)
def _digest(run_id: RunId) -> str:
    return hashlib.sha256(run_id.encode()).hexdigest()[:24]
