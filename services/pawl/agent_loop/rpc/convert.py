"""Requests of pawl.agent.v1 to values of ours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeVar

from pawl.agent.v1 import agent_pb2, conversation_pb2, types_pb2, undo_pb2, whoami_pb2
from pawl.agent_loop.app.frames import CallDecision, ToolResult, UserMessage
from pawl.agent_loop.app.public_values import PageAsked, PendingFilter, RunFilter
from pawl.agent_loop.app.whoami import Introduction
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.command import CallResolution
from pawl.agent_loop.domain.imports import HistoryCall, HistoryMessage
from pawl.agent_loop.domain.options import NAME_CHARACTERS_MAX, AskedOptions
from pawl.agent_loop.domain.undo import CallUndo
from pawl.chassis.ids import ConversationId, RequestId, RunId, check_agent_name, check_id
from pawl.chassis.labels import check_labels
from pawl.chassis.translate import Exceptions, Translator, Unknown, enum_defaults, seconds
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from pawl.values.call import CallState
from pawl.values.run import MessagePolicy, RunState, WaitKind

P = TypeVar("P", types_pb2.ToolResult, types_pb2.CallDecision)

SEQ_MAX: Final = 2**63 - 1
RESULTS_MAX: Final = 64
PENDING_BYTES_MAX: Final = 2 * 1024 * 1024


def _no_known_value(unknown: Unknown) -> InvalidField:
    return InvalidField(f"{unknown.field} has no known value", field=unknown.field)


WIRE: Final = Translator(
    _no_known_value, defaults={**enum_defaults(AskedOptions()), MessagePolicy: MessagePolicy.QUEUE}
)
resolution: Final = WIRE.enum(CallResolution, agent_pb2.Resolution, field="resolution").read
"""Return what an operator found out."""
_RUN_STATES: Final = WIRE.enum(RunState, run_pb2.RunState, field="states")
_WAITS: Final = WIRE.enum(WaitKind, run_pb2.WaitKind, field="waits")
_CALL_STATES: Final = WIRE.enum(CallState, call_pb2.CallState, field="filter.states")
options: Final = WIRE.struct(
    AskedOptions,
    run_pb2.RunOptions,
    Exceptions(
        read={"limits": lambda message: {field.name: value for field, value in message.limits.ListFields()}},
        write={"limits": lambda asked: dict(asked.limits) or None},
    ),
    field="options",
).read
"""Return what a client asks of a run; InvalidField if an enum has no known value."""
# In this order: nested in a frame they are as they are here.
_RESULT: Final = WIRE.struct(ToolResult, types_pb2.ToolResult)
_DECISION: Final = WIRE.struct(CallDecision, types_pb2.CallDecision, field="decision")


def definitions(request: Any) -> tuple[bytes, ...]:
    """Return the tools that come with a run, each as the contract has it; what is too many is not all looked at."""
    first = islice(request.front_end_tools, checks.OWN_TOOLS_MAX + 1)
    return tuple(each.SerializeToString(deterministic=True) for each in first)


BRINGS_TOOLS: Final = Exceptions(read={"front_end_tools": definitions}, unwritten=("front_end_tools",))
"""The exceptions of a message that may bring tools."""
_FIRST: Final = BRINGS_TOOLS._replace(of_message=("request_id",))
first_message: Final = WIRE.struct(UserMessage, agent_pb2.StartRunRequest, _FIRST).read
"""Return the message that starts a run; raises as `options` does."""
next_message: Final = WIRE.struct(
    UserMessage,
    agent_pb2.SendMessageRequest,
    Exceptions(of_message=("request_id",), of_struct=("conversation_key", "front_end_tools")),
).read
"""Return the message to a conversation; raises as `options` does."""
WIRE.struct(HistoryCall, conversation_pb2.HistoryCall)
history_message: Final = WIRE.struct(HistoryMessage, conversation_pb2.HistoryMessage).read
"""Return a message of a history; InvalidField if its role has no known value."""
UNDO: Final = WIRE.struct(CallUndo, undo_pb2.CallUndo)
"""Between a call of a preview or a report of an undo, and its message."""
INTRODUCTION: Final = WIRE.struct(Introduction, whoami_pb2.WhoAmIResponse)
"""Between what a caller is told about itself, and its message."""


def run_id(request: Any) -> RunId:
    """Return the run that a request names."""
    return check_id(request.run_id, "run_id")


def request_id(request: Any) -> RequestId:
    """Return the id of a request; empty if it has none."""
    return check_id(request.request_id, "request_id", optional=True)


def page(request: Any) -> PageAsked:
    """Return which page of a list a request asks for.

    Raises:
        InvalidField
    """
    return PageAsked(page_size=checks.page_size(request.page_size), page_token=request.page_token)


def run_filter(request: agent_pb2.ListRunsRequest) -> RunFilter:
    """Return which runs a list is asked for, and in which order.

    Raises:
        InvalidId, InvalidField
    """
    if request.order not in agent_pb2.RunOrder.values():
        raise InvalidField("order has no known value", field="order")
    return RunFilter(
        conversation_id=ConversationId(check_id(request.conversation_id, "conversation_id", optional=True)),
        # Each value once: a filter of millions must not keep the process busy.
        states=tuple(map(_RUN_STATES.read, dict.fromkeys(request.states))),
        oldest_first=request.order == agent_pb2.RUN_ORDER_OLDEST_FIRST,
        create_time_from=_moment(request, "create_time_from"),
        create_time_before=_moment(request, "create_time_before"),
        waits=tuple(map(_WAITS.read, dict.fromkeys(request.waits))),
        parent_run_id=RunId(check_id(request.parent_run_id, "parent_run_id", optional=True)),
        agent_name=check_agent_name(request.agent, "agent", optional=True),
        labels=check_labels(request.labels),
    )


def _moment(
    request: agent_pb2.ListRunsRequest, field: Literal["create_time_from", "create_time_before"]
) -> float | None:
    """Return a time that may be absent, in seconds since 1970."""
    if not request.HasField(field):
        return None
    time = getattr(request, field)
    try:
        time.ToDatetime()
    except ValueError:
        raise InvalidField(f"{field} is no time from the year 1 to 9999", field=field) from None
    return seconds(time)


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


def tool_results(messages: Sequence[types_pb2.ToolResult], *, run_id: RunId) -> list[ToolResult]:
    """Return the results of a request about one run, which each may name again.

    Raises:
        InvalidId, InvalidField: one is wrong, or there are none, or more than 64.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"1 to {RESULTS_MAX} results", field="results")
    return [_RESULT.read(_with_ids(message, "tool_result", run_id)) for message in messages]


def decisions(messages: Sequence[types_pb2.CallDecision]) -> list[CallDecision]:
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


def pending_filter(message: agent_pb2.PendingFilter) -> PendingFilter:
    """Return which of the calls that wait are asked for.

    Raises:
        InvalidId, InvalidField
    """
    scope = message.scope or agent_pb2.PENDING_SCOPE_MINE
    if scope not in {agent_pb2.PENDING_SCOPE_MINE, agent_pb2.PENDING_SCOPE_STORE}:
        raise InvalidField("scope has no known value", field="filter.scope")
    of_store = scope == agent_pb2.PENDING_SCOPE_STORE
    if of_store and message.conversation_id:
        raise InvalidField("conversations are private: conversation_id goes with MINE", field="filter.conversation_id")
    if len(message.tool_name) > NAME_CHARACTERS_MAX:
        raise InvalidField("a tool's name has at most 256 characters", field="filter.tool_name")
    return PendingFilter(
        of_store=of_store,
        states=tuple(map(_CALL_STATES.read, dict.fromkeys(message.states))),
        tool_name=message.tool_name,
        conversation_id=ConversationId(check_id(message.conversation_id, "filter.conversation_id", optional=True)),
    )


def decision(message: types_pb2.CallDecision, *, run_id: RunId = RunId("")) -> CallDecision:
    """Return a decision; `run_id` is that of the request, if it has one, which the decision may name again.

    Raises:
        InvalidId, InvalidField
    """
    return _DECISION.read(_with_ids(message, "decision", run_id))


def seq(value: int, field: str) -> int:
    """Return `value` if a log can be that long.

    Raises:
        InvalidField
    """
    if value > SEQ_MAX:
        raise InvalidField(f"{field} is too large", field=field)
    return value


def _with_ids(message: P, field: str, run_id: RunId) -> P:
    """Return part of a request with its run, where the request names one, once its ids are checked."""
    if run_id and message.run_id not in {"", run_id}:
        raise InvalidField(f"{field}.run_id is another run than the request's", field=f"{field}.run_id")
    message.run_id = run_id or check_id(message.run_id, f"{field}.run_id")
    check_id(message.call_id, f"{field}.call_id")
    return message
