"""Translates between pawl.tool.v1 messages and the domain types."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import check_agent_name, check_id
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool_registry.audit.recorder import GRANT, AuditTrail
from pawl.tool_registry.audit.rules import ENDS, AuditDraft, AuditKind, sha256_hex
from pawl.tool_registry.policy.call import ExecuteRequest, ProposedCall
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.rules.registering import own_label
from pawl.tool_registry.rules.verdict import CallContext, Verdict
from pawl.tools.rules.definition import ASYNC_TIMEOUT_SECONDS_MAX, VERSION_MAX, ToolDefinition, ToolVersion
from pawl.tools.rules.schema import read_schema
from pawl.tools.wire import DEFINITION, WIRE
from pawl.values import (
    CallState,
    Category,
    DecisionKind,
    EffectClass,
    ExecutionContext,
    Progress,
    ReadTimeouts,
    Series,
)

_SHA256: Final = re.compile("[0-9a-f]{64}")
_DURATION_SECONDS_MAX: Final = 1e10
_RESULT_BYTES_MAX: Final = (1 << 32) - 1


_TOOL: Final = WIRE.struct(ToolVersion, tool_pb2.Tool, Exceptions(of_struct=("store_id", "binding", "user_id")))
_OF_DEFINITION: Final = (
    *("context", "category", "effect_class", "timeout_seconds", "without_background", "async_timeout_seconds"),
    "reports",
)
_OF_FRONT_END: Final = ("offer_fallback", "fallback_tool_name")
_VERDICT: Final = WIRE.struct(
    Verdict,
    execution_pb2.Verdict,
    Exceptions(
        of_struct=("definition", "accepted", "grant_call_id"),
        # Set by code, from the definition and arguments if available.
        of_message=(*_OF_DEFINITION, *_OF_FRONT_END, "parallel", "arguments_json", "note", "result"),
    ),
)
_SERIES: Final = WIRE.struct(Series, call_pb2.Series)
_CALL_RESULT: Final = WIRE.struct(
    ExecutionResult,
    call_pb2.CallResult,
    Exceptions(of_struct=("outcome", "duration_seconds", "question", "completion_seconds_left")),
)
RESULT: Final = WIRE.struct(
    ExecutionResult,
    execution_pb2.ExecutionResult,
    Exceptions(
        write={"result": _CALL_RESULT.fields},
        of_struct=("content", "is_error", "error_reason", "note", "inverse"),
    ),
)
PROGRESS: Final = WIRE.struct(Progress, execution_pb2.ExecutionProgress)


def own_definition_from(message: tool_pb2.ToolDefinition) -> ToolDefinition:
    """Parse the definition of a tool sent with a run. The default context is FRONTEND.

    Raises:
        InvalidField, InvalidSchema: A value is invalid, or the schema is not a JSON object.
    """
    if not message.context:
        message.context = call_pb2.EXECUTION_CONTEXT_FRONTEND
    return DEFINITION.read(message)


def workflow_tool_from(message: execution_pb2.PutWorkflowToolRequest) -> ToolDefinition:
    """Return the definition of a workflow's tool.

    Each call starts one run, whose ID is derived from the call. The calls that this run makes need their own approvals.

    Raises:
        InvalidSchema: The input schema is not a JSON object.
    """
    return ToolDefinition(
        name=message.name,
        description=message.description,
        arguments_schema=read_schema(message.input_schema_json),
        context=ExecutionContext.AGENT,
        category=Category.SAFE,
        effect=EffectClass.IDEMPOTENT,
    )


def proposed_from(message: execution_pb2.ProposedCall) -> ProposedCall:
    """Parse a proposed call.

    Raises:
        InvalidField, InvalidSchema: The tool sent with the run cannot be read.
    """
    own = DEFINITION.read(message.own_tool.definition) if message.HasField("own_tool") else None
    if own is not None and own.name != message.tool_name:
        raise InvalidField("own_tool must have the name of the call's tool", field="own_tool")
    return ProposedCall(
        tool_name=message.tool_name,
        tool_version=message.tool_version,
        arguments=message.arguments_json,
        is_edited=message.edited,
        own_tool=own,
        series=series_from(message),
    )


def series_from(message: execution_pb2.ProposedCall | execution_pb2.ExecuteToolRequest) -> Series | None:
    """Parse the series to which a call belongs, if any. Otherwise, return None.

    Raises:
        InvalidField: The series is invalid.
    """
    if not message.HasField("series"):
        return None
    series = _SERIES.read(message.series)
    check_id(series.grant_call_id, "series.grant_call_id", optional=True)
    if series.iterations_max < 1:
        raise InvalidField("series: iterations_max must be at least 1", field="series")
    if not series.interval_seconds > 0:
        raise InvalidField("series: interval_seconds must be greater than 0", field="series")
    return series


_MESSAGES_MAX: Final = 4096
_messages: dict[tuple[str, str, int, float], tool_pb2.Tool] = {}


def tool_message(entry: ToolVersion) -> tool_pb2.Tool:
    """Return the message for a version. The message is cached and shared, so do not modify it."""
    # Cached because versions never change and every run needs them. The creation time distinguishes two registries in
    # the same process.
    key = (entry.store_id, entry.definition.name, entry.version, entry.create_time)
    message = _messages.get(key)
    if message is None:
        if len(_messages) >= _MESSAGES_MAX:
            _messages.clear()
        message = _messages[key] = _TOOL.write(entry)
    return message


def _context_of(request: execution_pb2.ExecuteToolRequest) -> CallContext:
    return call_context_from(request.context, request.call_id, request.traceparent)


# Reads an execution request. Raises the same errors as `call_context_from` and `series_from`.
execute_request: Final = WIRE.struct(
    ExecuteRequest,
    execution_pb2.ExecuteToolRequest,
    Exceptions(read={"context": _context_of, "series": series_from}, unwritten=("context", "series")),
).read


def caller_from(context: execution_pb2.CallContext) -> Principal:
    """Return the user on whose behalf a service makes a call.

    Raises:
        InvalidId: An id is missing or malformed.
    """
    return Principal(
        store_id=check_id(context.store_id, "store_id"),
        user_id=check_id(context.user_id, "user_id"),
        roles=frozenset(context.user_roles),
    )


def call_context_from(context: execution_pb2.CallContext, call_id: str, traceparent: str = "") -> CallContext:
    """Parse the context of a call.

    Raises:
        InvalidId: An id is missing or malformed.
    """
    return CallContext(
        store_id=check_id(context.store_id, "store_id"),
        user_id=check_id(context.user_id, "user_id"),
        conversation_id=check_id(context.conversation_id, "conversation_id"),
        run_id=check_id(context.run_id, "run_id"),
        call_id=check_id(call_id, "call_id"),
        user_roles=frozenset(context.user_roles),
        approvals_required=context.approvals_required,
        above_ids=frozenset(part for each in context.above for part in (each.run_id, each.conversation_id)),
        agent_name=check_agent_name(context.agent_name, "agent_name"),
        agents_above=frozenset(check_agent_name(each.agent_name, "above.agent_name") for each in context.above),
        credential_id=check_id(context.credential_id, "credential_id", optional=True),
        delegate_user_id=check_id(context.delegate_user_id, "delegate_user_id", optional=True),
        in_background=context.in_background,
        traceparent=traceparent,
    )


def decision_from(audit: AuditTrail, context: CallContext, message: execution_pb2.RecordedDecision) -> AuditDraft:
    """Return the audit entry for a user's decision.

    Raises:
        InvalidField, InvalidId: The kind, the digest or an id is invalid.
    """
    if not message.kind or message.kind not in call_pb2.DecisionKind.values():
        raise InvalidField(f"kind: {message.kind} is not a known value", field="kind")
    digest = message.arguments_sha256
    return replace(
        _of_person(audit, context, AuditKind.DECIDED, message),
        verdict=DecisionKind(message.kind).name,
        reason=GRANT.format(context.call_id) if message.for_series else "",
        arguments_sha256=_sha256(digest, "arguments_sha256") if digest else sha256_hex(message.arguments_json),
    )


def result_from(audit: AuditTrail, context: CallContext, message: execution_pb2.RecordedResult) -> AuditDraft:
    """Return the audit entry for the end of a front-end call.

    Raises:
        InvalidField, InvalidId: The state, a digest, a number or an id is invalid.
    """
    if message.state not in ENDS:
        names = ", ".join(CallState(state).name for state in ENDS)
        raise InvalidField(f"state must be one of {names}", field="state")
    if not 0 <= message.duration_seconds <= _DURATION_SECONDS_MAX:
        raise InvalidField(
            f"duration_seconds must be between 0 and {_DURATION_SECONDS_MAX:g}, got {message.duration_seconds:g}",
            field="duration_seconds",
        )
    if message.result_bytes > _RESULT_BYTES_MAX:
        raise InvalidField(f"result_bytes must be at most {_RESULT_BYTES_MAX}", field="result_bytes")
    outcome, reason = ENDS[CallState(message.state)]
    return replace(
        _of_person(audit, context, AuditKind.RETURNED, message),
        verdict=outcome.value,
        reason=reason,
        arguments_sha256=_sha256(message.arguments_sha256, "arguments_sha256"),
        result_sha256=_sha256(message.result_sha256, "result_sha256"),
        result_bytes=message.result_bytes,
        duration_us=int(message.duration_seconds * 1_000_000),
    )


def _of_person(
    audit: AuditTrail,
    context: CallContext,
    kind: AuditKind,
    message: execution_pb2.RecordedDecision | execution_pb2.RecordedResult,
) -> AuditDraft:
    if message.tool_version > VERSION_MAX:
        raise InvalidField(f"tool_version must be at most {VERSION_MAX}", field="tool_version")
    return replace(
        audit.of_call(context, kind, _label(message), message.tool_version),
        by_user_id=check_id(message.user_id, "user_id"),
        by_credential_id=check_id(message.credential_id, "credential_id", optional=True),
        by_delegate_user_id=check_id(message.delegate_user_id, "delegate_user_id", optional=True),
    )


def _label(message: execution_pb2.RecordedDecision | execution_pb2.RecordedResult) -> str:
    digest = message.definition_sha256
    return own_label(message.tool_name, _sha256(digest, "definition_sha256")) if digest else message.tool_name


def _sha256(digest: str, field: str) -> str:
    if not _SHA256.fullmatch(digest):
        raise InvalidField(f"{field} must be 64 hex digits", field=field)
    return digest


def read_timeouts_from(request: execution_pb2.CheckCallsRequest) -> ReadTimeouts | None:
    """Parse the timeouts for read-only calls. Return None if the request does not ask for such calls to be run."""
    if not request.HasField("execute_reads"):
        return None
    asked = (request.execute_reads.timeout_seconds, request.execute_reads.timeout_seconds_max)
    if not all(seconds > 0 for seconds in asked):
        raise InvalidField("execute_reads: both timeouts must be greater than 0", field="execute_reads")
    # A deployment may allow runs longer timeouts than any tool can have.
    default, most = (min(seconds, ASYNC_TIMEOUT_SECONDS_MAX) for seconds in asked)
    return ReadTimeouts(timeout_seconds=default, timeout_seconds_max=most)


def verdict_message(verdict: Verdict, result: ExecutionResult | None) -> execution_pb2.Verdict:
    fields = _VERDICT.fields(verdict)
    if result is not None:
        fields["result"] = RESULT.fields(result)
    if verdict.accepted is not None:
        fields |= {"arguments_json": verdict.accepted.canonical, "note": verdict.accepted.note}
    definition = verdict.definition
    if definition is not None:
        is_front_end = definition.context is ExecutionContext.FRONTEND
        written = DEFINITION.fields(definition)
        fields |= {name: written[name] for name in (*_OF_DEFINITION, *(_OF_FRONT_END if is_front_end else ()))}
        fields["parallel"] = definition.runs_beside_others
    return execution_pb2.Verdict(**fields)
