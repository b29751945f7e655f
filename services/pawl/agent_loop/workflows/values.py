"""The values used in a workflow's expressions: its input, and the outputs and errors of nodes."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import output
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.run import PinnedWorkflow, Run
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows import expressions
from pawl.agent_loop.workflows.cursor import NodeKey, NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import (
    AgentNode,
    AnyNode,
    ConditionNode,
    HumanNode,
    MapNode,
    OutputNode,
    ParallelNode,
    WaitNode,
)
from pawl.agent_loop.workflows.graph import Graph, Step
from pawl.chassis.ids import CallId, RunId

# Limit for the value of an expression, a map's items, and the run's output.
BYTES_MAX: Final = expressions.RESULT_BYTES_MAX
# 1 January 10000, in seconds since 1970.
_TIME_MAX: Final = 253_402_300_800
_TOKEN_BYTES: Final = 16
_encode: Final = msgspec.json.Encoder().encode


class CallsNeeded(Exception):
    """Raised when a value depends on calls that must be read first."""

    def __init__(self, call_ids: frozenset[CallId]) -> None:
        super().__init__()
        self.call_ids = call_ids


def _all(value: Callable[[Step], Any], steps: Iterable[Step]) -> list[tuple[Step, Any]]:
    """Return the value of each step.

    Raises:
        CallsNeeded: Calls of some steps must be read first. The error lists all of them.
    """
    found, needed = [], frozenset[CallId]()
    for step in steps:
        try:
            found.append((step, value(step)))
        except CallsNeeded as error:
            needed |= error.call_ids
    if needed:
        raise CallsNeeded(needed)
    return found


class Values:
    """Evaluates the templates of one run's nodes. `calls` are the calls read so far."""

    def __init__(self, run: Run, pinned: PinnedWorkflow, graph: Graph, cursor: WorkflowCursor) -> None:
        self._run, self._pinned, self._graph, self._cursor = run, pinned, graph, cursor
        self._calls: tuple[Mapping[CallId, Call], ...] = ()
        # The values of the run that the items belong to.
        self._outer: Values | None = None
        if pinned.chunk is not None and graph.outer is not None and pinned.chunk.scope_state:
            outer = _cursor(pinned.chunk.scope_state)
            its_run = replace(run, run_id=outer.origins[0], output_json=b"")
            self._outer = Values(its_run, replace(pinned, chunk=None), graph.outer, outer)

    def with_calls(self, *calls: Mapping[CallId, Call]) -> Values:
        self._calls = calls
        if self._outer is not None:
            self._outer.with_calls(*calls)
        return self

    def rendered(self, template: Any, step: Step, extra: Mapping[str, Any] = {}) -> Any:
        """Return a node's template with its expressions replaced by their values.

        `extra` contains additional values, by name.

        Raises:
            CallsNeeded: Calls must be read first.
            ExpressionError: An expression fails.
        """
        return expressions.render(template, {**self._scope(step, expressions.references(template)), **extra})

    def output(self, step: Step) -> Any:
        """Return a node's output, or None if the node has not succeeded.

        Raises:
            CallsNeeded, ExpressionError
        """
        record = self._cursor.nodes.get(step.number)
        if record is None or record.state is not NodeState.SUCCEEDED:
            return None
        match step.node:
            case ConditionNode():
                return record.value
            case OutputNode() if self._run.output_json:
                return msgspec.json.decode(self._run.output_json)
            case OutputNode():
                return self.rendered(step.node.value, step)
            case WaitNode():
                return self.content(step, record) if record.event else None
            case ParallelNode():
                return self._branches(step)
            case HumanNode() if record.value:
                return self.rendered(step.node.default, step)
            case MapNode():
                return _decoded(self.items_json(step))
            case _:
                return value_of(step.node, self.content(step, record))

    def content(self, step: Step, record: NodeRecord) -> Any:
        """Return the result of a node's last call.

        Raises:
            CallsNeeded
        """
        call = self._call(self.call_id(step, record))
        return _decoded(call.result.content_json if call.result is not None else b"null")

    def items_json(self, step: Step) -> bytes:
        """Return the output of a map as JSON.

        Raises:
            CallsNeeded
        """
        record = self._cursor.nodes[step.number]
        run_id = self._cursor.run_id(record, self._run.run_id)
        keys = (NodeKey(record.iteration, record.attempt, chunk) for chunk in range(record.chunks))
        calls = self._known([cursors.call_id(run_id, step.number, key) for key in keys])
        results = (call.result.content_json for call in calls if call.result is not None)
        parts = [part for result in results for part in msgspec.json.decode(result, type=cursors.ChunkOutput).outputs]
        return b"[" + b",".join(map(bytes, parts)) + b"]"

    def error(self, step: Step) -> dict[str, str] | None:
        """Return the reason and message of a node's failure, or None if the node has not failed.

        Raises:
            CallsNeeded
        """
        record = self._cursor.nodes.get(step.number)
        if record is None or record.state is not NodeState.FAILED:
            return None
        message: Any = record.message
        if not message and not isinstance(step.node, ConditionNode | OutputNode | ParallelNode | WaitNode):
            content = self.content(step, record)
            message = content.get("error", "") if isinstance(content, dict) else ""
        return {"reason": record.reason, "message": message if isinstance(message, str) else _encode(message).decode()}

    def call_id(self, step: Step, record: NodeRecord) -> CallId:
        run_id = self._cursor.run_id(record, self._run.run_id)
        if record.event:
            return cursors.event_call_id(run_id, record.event)
        return cursors.call_id(run_id, step.number, record.key)

    def nodes(self, names: frozenset[str]) -> dict[str, dict[str, Any]]:
        """Return the values of `nodes.NAME` for some nodes of the workflow.

        Raises:
            CallsNeeded, ExpressionError
        """
        if self._outer is not None:
            return self._outer.nodes(names)
        steps = [step for step in self._graph.steps if step.path in names]
        return {step.path: found for step, found in _all(self._node, steps)}

    def _node(self, step: Step) -> dict[str, Any]:
        state = state_name(self._cursor.nodes.get(step.number))
        return {"output": self.output(step), "error": self.error(step), "state": state}

    def _scope(self, step: Step, names: frozenset[str]) -> dict[str, Any]:
        run = self._run
        scope: dict[str, Any] = {
            "input": _decoded(self._pinned.input_json),
            "nodes": self.nodes(names) if names else {},
            "run": {"id": run.run_id, "user": run.user_id},
        }
        if self._graph.mapping is None and (waits := self._graph.definition.waits):
            scope["tokens"] = {name: wait_token(self._pinned.token_key, run.run_id, name) for name in waits}
        if self._graph.mapping is not None and self._pinned.chunk is not None and step.item is not None:
            items = _decoded(self._pinned.chunk.items_json)
            scope |= {self._graph.mapping.as_: items[step.number], "index": step.item}
        return scope

    def _branches(self, step: Step) -> dict[str, Any]:
        nodes = self._cursor.nodes
        ended = (number for number in step.branches if number in nodes and nodes[number].state is NodeState.SUCCEEDED)
        found = _all(self.output, [self._graph.steps[number] for number in ended])
        return {branch.path.rpartition(".")[2]: output for branch, output in found}

    def _call(self, call_id: CallId) -> Call:
        return self._known([call_id])[0]

    def _known(self, call_ids: list[CallId]) -> list[Call]:
        found = {call_id: calls[call_id] for call_id in call_ids for calls in self._calls if call_id in calls}
        needed = frozenset(call_ids) - found.keys()
        if needed:
            raise CallsNeeded(needed)
        return [found[call_id] for call_id in call_ids]


def state_name(record: NodeRecord | None) -> str:
    """Return the value of `nodes.NAME.state`."""
    if record is None:
        return "PENDING"
    return NodeState.RUNNING.value if record.is_open else record.state.value


def value_of(node: AnyNode, content: Any) -> Any:
    """Return the output of a node whose call returned `content`.

    Raises:
        ExpressionError: An agent's answer is not the requested JSON.
    """
    match node:
        case AgentNode():
            answer = content.get("answer", "") if isinstance(content, dict) else ""
            return answer if node.output_schema is None else _json_of(answer)
        case HumanNode():
            return content.get("answer", content) if isinstance(content, dict) else content
        case _:
            return content


def _json_of(answer: str) -> Any:
    try:
        return msgspec.json.decode(output.document(answer) or b"")
    except msgspec.DecodeError:
        raise ExpressionError("the agent's answer is not JSON") from None


@lru_cache(maxsize=32)
def _cursor(data: bytes) -> WorkflowCursor:
    return msgspec.json.decode(data, type=WorkflowCursor)


@lru_cache(maxsize=32)
def _decoded(data: bytes) -> Any:
    # The value is shared, so callers must not change it.
    return msgspec.json.decode(data)


def time_of(value: Any) -> float:
    """Parse a time in RFC 3339 format or in seconds since 1970.

    Raises:
        ExpressionError
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _TIME_MAX:
        return float(value)
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise ExpressionError("`until` must be an RFC 3339 time with a UTC offset, or a number of seconds since 1970")
    return found.timestamp()


def wait_token(key: bytes, run_id: RunId, node: str) -> str:
    """Return the token that allows its holder to send an event to one node."""
    return f"{run_id}.{node}.{hmac.digest(key, node.encode(), 'sha256')[:_TOKEN_BYTES].hex()}"


def event_of_token(node: str) -> str:
    """Return the name of the event that only this node accepts. A definition cannot contain such a name."""
    return f"#{node}"


def is_too_large(data: bytes) -> bool:
    return len(data) > BYTES_MAX
