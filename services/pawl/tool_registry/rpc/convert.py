"""Between pawl.tool.v1 and the domain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from pawl.chassis.ids import check_id
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidField, InvalidJson, InvalidSchema, TooLarge
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool_registry.domain.audit import ENDS, RecordedDecision, RecordedResult, sha256_hex
from pawl.tool_registry.domain.definition import (
    VERSION_MAX,
    Caller,
    Category,
    EffectClass,
    ExecutionContext,
    OfferFallback,
    ToolDefinition,
    ToolVersion,
)
from pawl.tool_registry.domain.execution import ExecutionResult, Progress
from pawl.tool_registry.domain.question import Answer, Question
from pawl.tool_registry.domain.schema import SCHEMA_BYTES_MAX
from pawl.tool_registry.domain.verdict import CallContext, Verdict

E = TypeVar("E", ExecutionContext, Category, EffectClass, OfferFallback)

_SHA256: Final = re.compile("[0-9a-f]{64}")
_DURATION_SECONDS_MAX: Final = 1e10
_RESULT_BYTES_MAX: Final = (1 << 32) - 1

# The names of the contract's enums, less their prefixes, are those of the domain.
_WIRE: Final[dict[type[Any], tuple[Any, str]]] = {
    ExecutionContext: (call_pb2.ExecutionContext, "EXECUTION_CONTEXT_"),
    Category: (call_pb2.ToolCategory, "TOOL_CATEGORY_"),
    EffectClass: (call_pb2.EffectClass, "EFFECT_CLASS_"),
    OfferFallback: (call_pb2.OfferFallback, "OFFER_FALLBACK_"),
}


def _to_wire(value: ExecutionContext | Category | EffectClass | OfferFallback) -> Any:
    enum, prefix = _WIRE[type(value)]
    return enum.Value(f"{prefix}{value.name}")


def _from_wire(cls: type[E], number: int, field: str, default: E | None) -> E:
    enum, prefix = _WIRE[cls]
    if number == 0 and default is not None:
        return default
    try:
        return cls(enum.Name(number).removeprefix(prefix))
    except ValueError:
        raise InvalidField(f"{field}: {number} is not a value of it", field=field) from None


def definition_from(message: tool_pb2.ToolDefinition) -> ToolDefinition:
    """Return the definition of a message, with the cautious values in place of unspecified ones.

    Raises:
        InvalidField, InvalidSchema: something has no meaning; ranges are not checked here.
    """
    try:
        schema = loads(message.arguments_schema_json, bytes_max=SCHEMA_BYTES_MAX)
    except TooLarge as error:
        raise InvalidSchema(f"the arguments schema is too large: {error.message}") from None
    except InvalidJson as error:
        raise InvalidSchema(f"the arguments schema is not strict JSON: {error.message}") from None
    if not isinstance(schema, dict):
        raise InvalidSchema("the arguments schema must be a JSON object")
    return ToolDefinition(
        name=message.name,
        description=message.description,
        arguments_schema=schema,
        context=_from_wire(ExecutionContext, message.context, "context", None),
        category=_from_wire(Category, message.category, "category", Category.SENSITIVE),
        effect=_from_wire(EffectClass, message.effect_class, "effect_class", EffectClass.AT_MOST_ONCE),
        timeout_seconds=message.timeout_seconds,
        parallel=message.parallel,
        resource_keys=tuple(message.resource_keys),
        result_bytes_max=message.result_bytes_max,
        allowed_user_ids=tuple(message.allowed_user_ids),
        allowed_roles=tuple(message.allowed_roles),
        rate_per_minute=message.rate_per_minute,
        cache_seconds=message.cache_seconds,
        approvals_required=message.approvals_required,
        offer_fallback=_from_wire(OfferFallback, message.offer_fallback, "offer_fallback", OfferFallback.FAIL),
        fallback_tool_name=message.fallback_tool_name,
    )


_MESSAGES_MAX: Final = 4096
_messages: dict[tuple[str, str, int, float], tool_pb2.Tool] = {}


def tool_message(entry: ToolVersion) -> tool_pb2.Tool:
    """Return the message of a version. It is shared: do not change it."""
    # What never changes, and is asked for by every run. The time tells two registers of one process apart.
    key = (entry.store_id, entry.definition.name, entry.version, entry.create_time)
    message = _messages.get(key)
    if message is None:
        if len(_messages) >= _MESSAGES_MAX:
            _messages.clear()
        message = _messages[key] = _tool_message(entry)
    return message


def _tool_message(entry: ToolVersion) -> tool_pb2.Tool:
    message = tool_pb2.Tool(
        definition=definition_message(entry.definition),
        version=entry.version,
        source=entry.source,
    )
    message.create_time.FromMicroseconds(int(entry.create_time * 1_000_000))
    return message


def definition_message(definition: ToolDefinition) -> tool_pb2.ToolDefinition:
    """Return the message of a definition."""
    return tool_pb2.ToolDefinition(
        name=definition.name,
        description=definition.description,
        arguments_schema_json=dumps_canonical(dict(definition.arguments_schema)),
        context=_to_wire(definition.context),
        category=_to_wire(definition.category),
        effect_class=_to_wire(definition.effect),
        timeout_seconds=definition.timeout_seconds,
        parallel=definition.parallel,
        resource_keys=definition.resource_keys,
        result_bytes_max=definition.result_bytes_max,
        allowed_user_ids=definition.allowed_user_ids,
        allowed_roles=definition.allowed_roles,
        rate_per_minute=definition.rate_per_minute,
        cache_seconds=definition.cache_seconds,
        approvals_required=definition.approvals_required,
        offer_fallback=_to_wire(definition.offer_fallback),
        fallback_tool_name=definition.fallback_tool_name,
    )


def caller_from(context: execution_pb2.CallContext) -> Caller:
    """Return on whose behalf a service asks.

    Raises:
        InvalidId: an id is missing or malformed.
    """
    return Caller(
        store_id=check_id(context.store_id, "store_id"),
        user_id=check_id(context.user_id, "user_id"),
        roles=frozenset(context.user_roles),
    )


def call_context_from(context: execution_pb2.CallContext, call_id: str) -> CallContext:
    """Return which call of which run is meant.

    Raises:
        InvalidId: an id is missing or malformed.
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
    )


def decision_from(message: execution_pb2.RecordedDecision) -> RecordedDecision:
    """Return what a person decided.

    Raises:
        InvalidField, InvalidId: the kind or the digest is not one, or the person's id is malformed.
    """
    name = call_pb2.DecisionKind.Name(message.kind) if message.kind in call_pb2.DecisionKind.values() else ""
    kind = name.removeprefix("DECISION_KIND_")
    if kind in {"", "UNSPECIFIED"}:
        raise InvalidField(f"kind: {message.kind} is not a value of it", field="kind")
    digest = message.arguments_sha256
    return RecordedDecision(
        tool_name=message.tool_name,
        tool_version=_version(message.tool_version),
        kind=kind,
        by_user_id=check_id(message.user_id, "user_id"),
        arguments_sha256=_sha256(digest, "arguments_sha256") if digest else sha256_hex(message.arguments_json),
    )


def result_from(message: execution_pb2.RecordedResult) -> RecordedResult:
    """Return how a front-end call ended.

    Raises:
        InvalidField, InvalidId: the state, a digest or a number is not one, or the person's id is malformed.
    """
    name = call_pb2.CallState.Name(message.state) if message.state in call_pb2.CallState.values() else ""
    state = name.removeprefix("CALL_STATE_")
    if state not in ENDS:
        raise InvalidField(f"state: must be one of {', '.join(ENDS)}", field="state")
    if not 0 <= message.duration_seconds <= _DURATION_SECONDS_MAX:
        raise InvalidField(f"duration_seconds: must be 0 to {_DURATION_SECONDS_MAX:g}", field="duration_seconds")
    if message.result_bytes > _RESULT_BYTES_MAX:
        raise InvalidField(f"result_bytes: at most {_RESULT_BYTES_MAX}", field="result_bytes")
    return RecordedResult(
        tool_name=message.tool_name,
        tool_version=_version(message.tool_version),
        by_user_id=check_id(message.user_id, "user_id"),
        state=state,
        arguments_sha256=_sha256(message.arguments_sha256, "arguments_sha256"),
        result_sha256=_sha256(message.result_sha256, "result_sha256"),
        result_bytes=message.result_bytes,
        duration_seconds=message.duration_seconds,
    )


def _version(number: int) -> int:
    if number > VERSION_MAX:
        raise InvalidField(f"tool_version: at most {VERSION_MAX}", field="tool_version")
    return number


def _sha256(digest: str, field: str) -> str:
    if not _SHA256.fullmatch(digest):
        raise InvalidField(f"{field}: must be 64 hex digits", field=field)
    return digest


def verdict_message(verdict: Verdict) -> execution_pb2.Verdict:
    """Return the message of a verdict."""
    message = execution_pb2.Verdict(
        call_id=verdict.call_id,
        disposition=execution_pb2.Disposition.Value(f"DISPOSITION_{verdict.disposition}"),
        tool_version=verdict.tool_version,
        resource_keys=verdict.resource_keys,
        digest=verdict.digest,
        preview=verdict.preview,
        approval_cause=verdict.approval_cause,
        approvals_required=verdict.approvals_required,
        error_reason=verdict.error_reason,
        error_message=verdict.error_message,
        rule_id=verdict.rule_id,
    )
    if verdict.accepted is not None:
        message.arguments_json = verdict.accepted.canonical
        message.note = verdict.accepted.note
    definition = verdict.definition
    if definition is not None:
        message.context = _to_wire(definition.context)
        message.category = _to_wire(definition.category)
        message.effect_class = _to_wire(definition.effect)
        message.timeout_seconds = definition.timeout_seconds
        message.parallel = definition.runs_beside_others
        if definition.context is ExecutionContext.FRONTEND:
            message.offer_fallback = _to_wire(definition.offer_fallback)
            message.fallback_tool_name = definition.fallback_tool_name
    if verdict.question is not None:
        message.question.CopyFrom(_question_message(verdict.question))
    return message


def _question_message(question: Question) -> call_pb2.Question:
    return call_pb2.Question(
        question=question.question,
        why=question.why,
        kind=call_pb2.QuestionKind.Value(f"QUESTION_KIND_{question.kind.upper()}"),
        options=question.options,
        default_answer=question.default_answer,
        timeout_seconds=question.timeout_seconds,
        answer_schema_json=question.answer_schema_json,
    )


def answers_from(messages: Iterable[execution_pb2.Answer]) -> tuple[Answer, ...]:
    """Return the answers to what a tool has asked."""
    return tuple(
        Answer(question=message.question, answer=message.answer, is_declined=message.declined) for message in messages
    )


def progress_message(progress: Progress) -> execution_pb2.ExecutionProgress:
    """Return the message of progress."""
    return execution_pb2.ExecutionProgress(fraction=progress.fraction, message=progress.message)


def result_message(result: ExecutionResult) -> execution_pb2.ExecutionResult:
    """Return the message of a result."""
    message = execution_pb2.ExecutionResult(
        outcome=execution_pb2.ExecutionOutcome.Value(f"EXECUTION_OUTCOME_{result.outcome}"),
        result=call_pb2.CallResult(
            content_json=result.content,
            is_error=result.is_error,
            error_reason=result.error_reason,
            note=result.note,
        ),
        duration_seconds=result.duration_seconds,
    )
    if result.question is not None:
        message.question.CopyFrom(_question_message(result.question))
    if result.inverse is not None:
        message.result.inverse.tool_name = result.inverse.tool_name
        message.result.inverse.arguments_json = result.inverse.arguments
        message.result.inverse.summary = result.inverse.summary
    return message
