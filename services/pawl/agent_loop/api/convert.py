"""Requests of pawl.agent.v1 to values of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

from pawl.agent.v1 import agent_pb2, conversation_pb2, types_pb2, undo_pb2
from pawl.agent_loop.conversations.rules import HistoryCall, HistoryMessage
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX
from pawl.agent_loop.undo.rules import CallUndo
from pawl.chassis.ids import RequestId, RunId, check_id
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2

WIRE: Final = wire.CLIENTS
P = TypeVar("P", types_pb2.ToolResult, types_pb2.CallDecision)

RESULTS_MAX: Final = 64
PENDING_BYTES_MAX: Final = 2 * 1024 * 1024

WIRE.struct(HistoryCall, conversation_pb2.HistoryCall)
history_message: Final = WIRE.struct(HistoryMessage, conversation_pb2.HistoryMessage).read
"""Return a message of a history; InvalidField if its role has no known value."""
UNDO: Final = WIRE.struct(CallUndo, undo_pb2.CallUndo)
"""Between a call of a preview or a report of an undo, and its message."""


def run_id(request: Any) -> RunId:
    """Return the run that a request names."""
    return check_id(request.run_id, "run_id")


def request_id(request: Any) -> RequestId:
    """Return the id of a request; empty if it has none."""
    return check_id(request.request_id, "request_id", optional=True)


def _check_known(kind: Any, values: Sequence[int], field: str) -> None:
    if not set(values) <= set(kind.values()):
        raise InvalidField(f"{field} has no known value", field=field)


def run_message(run: run_pb2.Run) -> run_pb2.Run:
    """Return a run with as many of its open calls as fit into an answer, at least one; those that wait come first."""
    size_bytes, pending = 0, len(run.pending_calls)
    for count, call in enumerate((*run.pending_calls, *run.active_calls)):
        size_bytes += call.ByteSize()
        if count and size_bytes > PENDING_BYTES_MAX:
            cut = run_pb2.Run()
            cut.CopyFrom(run)
            del cut.pending_calls[count:]
            del cut.active_calls[max(0, count - pending) :]
            return cut
    return run


def tool_results(messages: Sequence[types_pb2.ToolResult], *, run_id: RunId) -> Sequence[types_pb2.ToolResult]:
    """Return the results of a request about one run, which each may name again.

    Raises:
        InvalidId, InvalidField: one is wrong, or there are none, or more than 64.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"1 to {RESULTS_MAX} results", field="results")
    return [_with_ids(message, "tool_result", run_id) for message in messages]


def decisions(messages: Sequence[types_pb2.CallDecision]) -> Sequence[types_pb2.CallDecision]:
    """Return the decisions of a request.

    Raises:
        InvalidId, InvalidField: one is wrong, there are none, more than 64, or two about one call.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"1 to {RESULTS_MAX} decisions", field="decisions")
    found = [decision(message) for message in messages]
    if len({decided.call_id for decided in found}) != len(found):
        raise InvalidField("at most one decision about a call", field="decisions")
    return found


def pending_filter(
    message: agent_pb2.PendingFilter, *, page_size: int = 0, page_token: str = ""
) -> ledger_pb2.ListPendingCallsRequest:
    """Return which of the calls that wait are asked for.

    Raises:
        InvalidId, InvalidField
    """
    _check_known(agent_pb2.PendingScope, [message.scope], "filter.scope")
    _check_known(call_pb2.CallState, message.states, "filter.states")
    of_store = message.scope == agent_pb2.PENDING_SCOPE_STORE
    if of_store and message.conversation_id:
        raise InvalidField("conversations are private: conversation_id goes with MINE", field="filter.conversation_id")
    if len(message.tool_name) > NAME_CHARACTERS_MAX:
        raise InvalidField("a tool's name has at most 256 characters", field="filter.tool_name")
    return ledger_pb2.ListPendingCallsRequest(
        of_all_users=of_store,
        # Each value once: a filter of millions must not keep the process busy.
        states=dict.fromkeys(message.states),
        tool_name=message.tool_name,
        conversation_id=check_id(message.conversation_id, "filter.conversation_id", optional=True),
        page_size=checks.page_size(page_size),
        page_token=page_token,
    )


def decision(message: types_pb2.CallDecision, *, run_id: RunId = RunId("")) -> types_pb2.CallDecision:
    """Return a decision; `run_id` is that of the request, if it has one, which the decision may name again.

    Raises:
        InvalidId, InvalidField
    """
    check_kind(message)
    return _with_ids(message, "decision", run_id)


def check_kind(decision: types_pb2.CallDecision) -> None:
    """Raise InvalidField if this version does not know the kind of a decision."""
    if not decision.kind or decision.kind not in call_pb2.DecisionKind.values():
        raise InvalidField("decision.kind has no known value", field="decision.kind")


def _with_ids(message: P, field: str, run_id: RunId) -> P:
    """Return part of a request with its run, where the request names one, once its ids are checked."""
    if run_id and message.run_id not in {"", run_id}:
        raise InvalidField(f"{field}.run_id is another run than the request's", field=f"{field}.run_id")
    message.run_id = run_id or check_id(message.run_id, f"{field}.run_id")
    check_id(message.call_id, f"{field}.call_id")
    return message
