"""Validates and converts pawl.agent.v1 requests."""

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
UNDO: Final = WIRE.struct(CallUndo, undo_pb2.CallUndo)


def run_id(request: Any) -> RunId:
    return check_id(request.run_id, "run_id")


def request_id(request: Any) -> RequestId:
    """Return the validated request id, which may be empty."""
    return check_id(request.request_id, "request_id", optional=True)


def _check_known(kind: Any, values: Sequence[int], field: str) -> None:
    if not set(values) <= set(kind.values()):
        raise InvalidField(f"{field} has an unknown value", field=field)


def run_message(run: run_pb2.Run) -> run_pb2.Run:
    """Return `run` with as many open calls as fit into a response (at least one), pending calls first."""
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
    """Validate the results in a request about one run, and fill in missing run ids.

    Raises:
        InvalidId, InvalidField: A result is invalid or belongs to another run, or there are not 1 to 64 results.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"results must have between 1 and {RESULTS_MAX} entries", field="results")
    return [_with_ids(message, "tool_result", run_id) for message in messages]


def decisions(messages: Sequence[types_pb2.CallDecision]) -> Sequence[types_pb2.CallDecision]:
    """Validate a request's decisions.

    Raises:
        InvalidId, InvalidField: A decision is invalid, there are not 1 to 64 decisions, or two decisions are about
            the same call.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"decisions must have between 1 and {RESULTS_MAX} entries", field="decisions")
    found = [decision(message) for message in messages]
    if len({decided.call_id for decided in found}) != len(found):
        raise InvalidField("decisions must have at most one entry for each call", field="decisions")
    return found


def pending_filter(
    message: agent_pb2.PendingFilter, *, page_size: int = 0, page_token: str = ""
) -> ledger_pb2.ListPendingCallsRequest:
    """Translate a pending filter into the ledger's request.

    Raises:
        InvalidId, InvalidField
    """
    _check_known(agent_pb2.PendingScope, [message.scope], "filter.scope")
    _check_known(call_pb2.CallState, message.states, "filter.states")
    of_store = message.scope == agent_pb2.PENDING_SCOPE_STORE
    if of_store and message.conversation_id:
        raise InvalidField(
            "filter.conversation_id requires scope MINE, because conversations are private",
            field="filter.conversation_id",
        )
    if len(message.tool_name) > NAME_CHARACTERS_MAX:
        raise InvalidField("filter.tool_name must be at most 256 characters", field="filter.tool_name")
    return ledger_pb2.ListPendingCallsRequest(
        of_all_users=of_store,
        # Remove duplicates: a filter with millions of values must not keep the process busy.
        states=dict.fromkeys(message.states),
        tool_name=message.tool_name,
        conversation_id=check_id(message.conversation_id, "filter.conversation_id", optional=True),
        page_size=checks.page_size(page_size),
        page_token=page_token,
    )


def decision(message: types_pb2.CallDecision, *, run_id: RunId = RunId("")) -> types_pb2.CallDecision:
    """Validate a decision. If `run_id` is set, use it as the decision's run id.

    Raises:
        InvalidId, InvalidField: The decision is invalid, or its run is not `run_id`.
    """
    check_kind(message)
    return _with_ids(message, "decision", run_id)


def check_kind(decision: types_pb2.CallDecision) -> None:
    """Raise InvalidField if the decision's kind is unknown."""
    if not decision.kind or decision.kind not in call_pb2.DecisionKind.values():
        raise InvalidField("decision.kind has an unknown value", field="decision.kind")


def _with_ids(message: P, field: str, run_id: RunId) -> P:
    if run_id and message.run_id not in {"", run_id}:
        raise InvalidField(f"{field}.run_id must be empty or equal to the request's run_id", field=f"{field}.run_id")
    message.run_id = run_id or check_id(message.run_id, f"{field}.run_id")
    check_id(message.call_id, f"{field}.call_id")
    return message
