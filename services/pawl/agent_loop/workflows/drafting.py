"""Drafts the calls that nodes make. The registry checks only tool calls."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from pawl.agent_loop.agents.rules import RUN_AGENT
from pawl.agent_loop.loop.rules.assembly import ARGUMENTS_BYTES_MAX
from pawl.agent_loop.loop.rules.call import ApprovalRequest, Call, CallResult
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.undo.rules import UNDO_RUN
from pawl.agent_loop.workflows import cursor as cursors
from pawl.agent_loop.workflows.cursor import NodeKey, NodeRecord
from pawl.agent_loop.workflows.definition import (
    AgentNode,
    HumanNode,
    ToolNode,
    WorkflowNode,
)
from pawl.agent_loop.workflows.graph import Step
from pawl.agent_loop.workflows.values import Values
from pawl.chassis import strict_json
from pawl.chassis.ids import DEFAULT_AGENT, UserId
from pawl.values import CallState, Category, EffectClass, ExecutionContext, Question, QuestionKind

# Names of calls carried out by child runs. Names of workflows contain no dot.
RUN_WORKFLOW: Final = "workflow.run"
RUN_ITEMS: Final = "workflow.items"
# Names of calls that people answer.
ASK_USER: Final = "ask_user"
APPROVAL: Final = "approval"
EVENT: Final = "event"


class RunWorkflow(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a call that another workflow carries out. Version 0 means the newest."""

    workflow: str
    version: int = 0
    input: msgspec.Raw


class RunItems(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a call that processes items of a map. See `MapChunk`."""

    node: str
    first_index: int
    items: msgspec.Raw
    failures_max: int
    concurrency: int


class Chunk(NamedTuple):
    """A chunk of a map: its number, how many of its items may fail, and how many may run at a time."""

    number: int
    failures_max: int
    concurrency: int


def items_of(call: Call) -> RunItems:
    return msgspec.json.decode(call.arguments_json, type=RunItems)


def key_of(record: NodeRecord | None) -> NodeKey:
    """Return the key of a node's next call."""
    return NodeKey(1, 1, 0) if record is None else record.key


def of_node(values: Values, step: Step, record: NodeRecord | None, run: Run, now: float) -> Call:
    """Return the next call of a node other than a map.

    Raises:
        CallsNeeded: Calls must be read first.
        ExpressionError: An expression fails, or its value is not allowed.
    """
    node = step.node
    match node:
        case ToolNode():
            arguments = _object(values.rendered(node.arguments, step), "arguments")
            fields: dict[str, Any] = {"tool_name": node.tool, "proposed_arguments": _checked(arguments).decode()}
            fields["state"] = CallState.PROPOSED
        case AgentNode():
            fields = _delegated(RUN_AGENT, _agent_arguments(values, step, node))
        case WorkflowNode():
            given = _object(values.rendered(node.input, step), "input")
            arguments = {"workflow": node.workflow, "version": node.version, "input": given}
            fields = _delegated(RUN_WORKFLOW, arguments)
        case HumanNode():
            fields = _human(values, step, node, run, now)
        case _:
            raise TypeError(f"{step.path} does not make calls")
    call_id = cursors.call_id(run.run_id, step.number, key_of(record))
    if "approval" in fields:
        digest = hashlib.sha256(call_id.encode() + fields["arguments_json"]).hexdigest()
        fields["approval"] = ApprovalRequest(
            digest=digest,
            preview=fields["approval"],
            cause="workflow",
            approvals_required=max(1, run.options.approvals_required),
        )
    return _call(run, now, call_id=call_id, **fields)


def has_too_few_approvers(node: HumanNode, run: Run) -> bool:
    """Return whether a node asks one person for an approval although the run requires more approvals."""
    return node.form == "approval" and node.who != "approvers" and run.options.approvals_required > 1


def of_chunk(step: Step, items: list[Any], chunk: Chunk, run: Run, now: float) -> Call:
    """Return the call that processes a chunk of a map's items."""
    indexes = cursors.chunk_items(len(items), chunk.number)
    arguments = {
        "node": step.path,
        "first_index": indexes.start,
        "items": items[indexes.start : indexes.stop],
        "failures_max": chunk.failures_max,
        "concurrency": chunk.concurrency,
    }
    call_id = cursors.call_id(run.run_id, step.number, NodeKey(1, 1, chunk.number))
    return _call(run, now, call_id=call_id, **_delegated(RUN_ITEMS, arguments))


def of_event(run: Run, number: int, name: str, payload_json: bytes, now: float) -> Call:
    """Return the settled call that holds the payload of an event."""
    return _call(
        run,
        now,
        call_id=cursors.event_call_id(run.run_id, number),
        tool_name=EVENT,
        state=CallState.SUCCEEDED,
        arguments_json=strict_json.dumps_canonical({"name": name}),
        context=ExecutionContext.BACKEND,
        effect_class=EffectClass.READ_ONLY,
        attempt=1,
        start_time=now,
        end_time=now,
        result=CallResult(content_json=payload_json or b"null"),
    )


def of_undo(run: Run, now: float) -> Call:
    """Return the call whose child run undoes the effects of this run."""
    fields = _delegated(UNDO_RUN, {"run_id": run.run_id})
    return _call(run, now, call_id=cursors.undo_call_id(run.run_id), **fields)


def _call(run: Run, now: float, **fields: Any) -> Call:
    # All calls have index 0 because, unlike the calls of one model answer, they do not wait for each other.
    return Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        round=run.round + 1,
        index=0,
        create_time=now,
        **fields,
    )


def _delegated(tool_name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tool_name": tool_name,
        "state": CallState.RUNNABLE,
        "context": ExecutionContext.AGENT,
        "category": Category.SAFE,
        "effect_class": EffectClass.IDEMPOTENT,
        "arguments_json": msgspec.json.encode(arguments, order="deterministic"),
    }


def _agent_arguments(values: Values, step: Step, node: AgentNode) -> dict[str, Any]:
    arguments: dict[str, Any] = {"task": _text(values.rendered(node.task, step))}
    if node.agent != DEFAULT_AGENT:
        arguments["agent"] = node.agent
    if node.instructions:
        arguments["instructions"] = _text(values.rendered(node.instructions, step))
    if node.tools:
        arguments["tool_names"] = list(node.tools)
    return arguments


def _human(values: Values, step: Step, node: HumanNode, run: Run, now: float) -> dict[str, Any]:
    text, limits = _text(values.rendered(node.question, step)), run.options.limits
    own = node.deadline_seconds or 0.0
    fields: dict[str, Any] = {
        "tool_name": APPROVAL if node.form == "approval" else ASK_USER,
        "asked_user_id": _asked_user_id(node, run),
        "context": ExecutionContext.HUMAN,
        "category": Category.SAFE,
        "effect_class": EffectClass.READ_ONLY,
        "arguments_json": strict_json.dumps_canonical({"question": text, "options": list(node.options)}),
    }
    if node.form == "approval":
        seconds = own or limits.approval_expiry_seconds
        return fields | {"state": CallState.AWAITING_APPROVAL, "approval": text, "deadline_time": now + seconds}
    question = Question(
        question=text, kind=QuestionKind.CLARIFICATION, options=node.options, timeout_seconds=float(own)
    )
    seconds = own or limits.answer_timeout_seconds
    return fields | {"state": CallState.ASKED, "question": question, "deadline_time": now + seconds}


def _asked_user_id(node: HumanNode, run: Run) -> UserId:
    match node.who:
        case "user":
            return run.user_id
        case "approvers":
            return UserId("")
        case named:
            return UserId(named.user)


def _text(value: Any) -> str:
    return strict_json.storable(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ExpressionError(f"{name} must be an object, but it is {type(value).__name__}")
    return value


def _checked(arguments: Mapping[str, Any]) -> bytes:
    encoded = msgspec.json.encode(arguments)
    if len(encoded) > ARGUMENTS_BYTES_MAX:
        raise ExpressionError(f"the arguments are {len(encoded)} bytes; at most {ARGUMENTS_BYTES_MAX} are allowed")
    return encoded
