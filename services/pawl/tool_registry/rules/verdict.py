"""The verdict on a call, and the digests that bind approvals and grants to calls."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import CallId, RunId, StoreId
from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.tool_registry.rules.check import Accepted
from pawl.tools.rules.definition import ToolDefinition
from pawl.values import Disposition, Question, QuestionKind, RunContext, Series

_DIGEST_SCHEME: Final = "pawl.approval.1"
_GRANT_SCHEME: Final = "pawl.grant.1"


class CallContext(RunContext, frozen=True, kw_only=True):
    call_id: CallId
    # Parent runs and their conversations.
    above_ids: frozenset[str] = frozenset()
    # The parent runs' agents.
    agents_above: frozenset[str] = frozenset()
    # The trace context for the tool; may be empty.
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The registry's decision on a call. If `accepted` is None, the call is refused."""

    call_id: CallId
    disposition: Disposition
    definition: ToolDefinition | None = None
    tool_version: int = 0
    accepted: Accepted | None = None
    resource_keys: tuple[str, ...] = ()
    digest: str = ""
    preview: str = ""
    approval_cause: str = ""
    approvals_required: int = 0
    question: Question | None = None
    error_reason: str = ""
    error_message: str = ""
    rule_id: str = ""
    # The digest that a grant for the series must have. For a call that may run, the digest of the grant that covers it.
    series_digest: str = ""
    # The call whose approval gave that grant.
    grant_call_id: str = ""


def call_digest(
    *, store_id: StoreId, run_id: RunId, call_id: CallId, tool_name: str, tool_version: int, arguments: bytes
) -> str:
    """Return the SHA-256, in hex, that binds an approval to exactly one call. `arguments` is canonical JSON.

    The input is a JSON array of strings, so two different calls never hash the same string.
    """
    fields = [_DIGEST_SCHEME, store_id, run_id, call_id, tool_name, str(tool_version), arguments.decode()]
    return hashlib.sha256(dumps_canonical([*fields])).hexdigest()


def grant_digest(
    series: Series,
    *,
    store_id: StoreId,
    run_id: RunId,
    tool_name: str,
    tool_versions: tuple[int, int],
    arguments: bytes,
) -> str:
    """Return the SHA-256, in hex, that binds a grant to the calls of one series. `arguments` is canonical JSON.

    `tool_versions` contains the pinned and the current version, so a new version requires a new grant. Times are
    rounded to milliseconds, so that they do not change when they are converted between services.
    """
    end = "" if series.end_time is None else str(round(series.end_time * 1000))
    terms = [str(series.iterations_max), str(round(series.interval_seconds * 1000)), end]
    versions = [str(version) for version in tool_versions]
    fields = [_GRANT_SCHEME, store_id, run_id, tool_name, *versions, arguments.decode(), *terms]
    return hashlib.sha256(dumps_canonical([*fields])).hexdigest()


def question_of(definition: ToolDefinition, arguments: dict[str, JsonValue]) -> Question:
    """Return the question that a call of a HUMAN tool asks.

    It is built from the arguments `question`, `why`, `kind`, `options`, `default` and `timeout_minutes`. For a tool
    without a `question` argument, the question is its description.
    """
    kind = arguments.get("kind")
    minutes = arguments.get("timeout_minutes")
    options = arguments.get("options")
    return Question(
        question=_text(arguments.get("question")) or definition.description,
        why=_text(arguments.get("why")),
        kind=QuestionKind(kind) if kind in set(QuestionKind) else QuestionKind.CLARIFICATION,
        options=tuple(_text(option) for option in options) if isinstance(options, list) else (),
        default_answer=_text(arguments.get("default")),
        timeout_seconds=minutes * 60.0 if isinstance(minutes, int | float) and minutes > 0 else 0.0,
    )


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""
