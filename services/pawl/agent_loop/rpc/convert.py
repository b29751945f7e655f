"""Requests of pawl.agent.v1 to values of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2, undo_pb2
from pawl.agent_loop.app.frames import CallDecision, ToolResult, UserMessage
from pawl.agent_loop.app.public_values import Caller, MessagePolicy, PendingFilter
from pawl.agent_loop.domain.call import CallState, DecisionKind
from pawl.agent_loop.domain.command import CallResolution
from pawl.agent_loop.domain.options import NAME_CHARACTERS_MAX, AskedOptions
from pawl.agent_loop.domain.run import RunState
from pawl.agent_loop.domain.undo import CallUndo
from pawl.chassis.auth import Principal
from pawl.chassis.ids import check_id
from pawl.chassis.translate import Exceptions, Translator, Unknown, enum_defaults
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2

SEQ_MAX: Final = 2**63 - 1
RESULTS_MAX: Final = 64
PENDING_BYTES_MAX: Final = 2 * 1024 * 1024


def caller(principal: Principal) -> Caller:
    """Return on whose behalf a user's request is served."""
    return Caller(
        store_id=principal.store_id,
        user_id=principal.user_id,
        roles=principal.roles,
        credential_id=principal.credential_id,
        delegate_user_id=principal.delegate_user_id,
        decides=principal.decides,
    )


def _no_known_value(unknown: Unknown) -> InvalidField:
    return InvalidField(f"{unknown.field} has no known value", field=unknown.field)


WIRE: Final = Translator(
    _no_known_value, defaults={**enum_defaults(AskedOptions()), MessagePolicy: MessagePolicy.QUEUE}
)
policy: Final = WIRE.enum(MessagePolicy, types_pb2.MessagePolicy, field="policy").read
"""Return what a message does while a run is active."""
resolution: Final = WIRE.enum(CallResolution, agent_pb2.Resolution, field="resolution").read
"""Return what an operator found out."""
_RUN_STATES: Final = WIRE.enum(RunState, run_pb2.RunState, field="states")
_CALL_STATES: Final = WIRE.enum(CallState, call_pb2.CallState, field="filter.states")
_DECISIONS: Final = WIRE.enum(DecisionKind, call_pb2.DecisionKind, field="decision.kind")
options: Final = WIRE.struct(
    AskedOptions,
    run_pb2.RunOptions,
    Exceptions(
        read={"limits": lambda message: {field.name: value for field, value in message.limits.ListFields()}},
        unwritten=("limits",),
    ),
    field="options",
).read
"""Return what a client asks of a run; InvalidField if an enum has no known value."""
UNDO: Final = WIRE.struct(CallUndo, undo_pb2.CallUndo)
"""Between a call of a preview or a report of an undo, and its message."""


def message(
    said: agent_pb2.StartRunRequest | agent_pb2.SendMessageRequest | session_pb2.Start | session_pb2.UserMessage,
    conversation_id: str,
) -> UserMessage:
    """Return the message of a user, to a conversation whose id has been checked; raises as `options` does."""
    return UserMessage(
        conversation_id=conversation_id, text=said.text, options=options(said.options), policy=policy(said.policy)
    )


def run_states(numbers: Any) -> tuple[RunState, ...]:
    """Return the states that a list is filtered by."""
    # Each value once: a filter of millions must not keep the process busy.
    return tuple(map(_RUN_STATES.read, dict.fromkeys(numbers)))


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


def tool_results(messages: Sequence[types_pb2.ToolResult], *, run_id: str) -> list[ToolResult]:
    """Return the results of a request about one run.

    Raises:
        InvalidId, InvalidField: one is wrong, or there are none, or more than 64.
    """
    if not 1 <= len(messages) <= RESULTS_MAX:
        raise InvalidField(f"1 to {RESULTS_MAX} results", field="results")
    return [tool_result(message, run_id=run_id) for message in messages]


def tool_result(message: types_pb2.ToolResult, *, run_id: str = "") -> ToolResult:
    """Return a result; `run_id` is that of the request, which the result may name again.

    Raises:
        InvalidId, InvalidField
    """
    return ToolResult(
        run_id=_run_id(message.run_id, run_id, "tool_result.run_id"),
        call_id=check_id(message.call_id, "tool_result.call_id"),
        content_json=message.content_json,
        is_error=message.is_error,
        offer_epoch=message.offer_epoch,
    )


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
        conversation_id=check_id(message.conversation_id, "filter.conversation_id", optional=True),
    )


def decision(message: types_pb2.CallDecision, *, run_id: str = "") -> CallDecision:
    """Return a decision; `run_id` as in `tool_result`.

    Raises:
        InvalidId, InvalidField
    """
    return CallDecision(
        run_id=_run_id(message.run_id, run_id, "decision.run_id"),
        call_id=check_id(message.call_id, "decision.call_id"),
        kind=_DECISIONS.read(message.kind),
        digest=message.digest,
        arguments_json=message.arguments_json,
        reason=message.reason,
        answer=message.answer,
    )


def seq(value: int, field: str) -> int:
    """Return `value` if a log can be that long.

    Raises:
        InvalidField
    """
    if value > SEQ_MAX:
        raise InvalidField(f"{field} is too large", field=field)
    return value


def _run_id(inner: str, outer: str, field: str) -> str:
    if not outer:
        return check_id(inner, field)
    if inner not in {"", outer}:
        raise InvalidField(f"{field} is another run than the request's", field=field)
    return outer
