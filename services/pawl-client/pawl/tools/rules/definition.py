"""Definitions and versions of tools."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pawl.chassis import job_reports
from pawl.chassis.ids import StoreId, UserId, is_id
from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.errors import InvalidField
from pawl.tools.rules.resources import check_template
from pawl.values import (
    SEVERITY,
    Answer,
    Category,
    EffectClass,
    ExecutionContext,
    JobReports,
    OfferFallback,
    Question,
    ReportPolicy,
)

ARGUMENTS_BYTES_MAX: Final = 256 * 1024
RESULT_BYTES_MAX: Final = 1024 * 1024
CHECKPOINT_BYTES_MAX: Final = 16 * 1024
DESCRIPTION_BYTES_MAX: Final = 4096
TIMEOUT_SECONDS_MIN: Final = 0.1
TIMEOUT_SECONDS_MAX: Final = 3600.0
ASYNC_TIMEOUT_SECONDS_MAX: Final = 86_400.0
RESOURCE_KEYS_MAX: Final = 16
ALLOWED_USERS_MAX: Final = 1000
ALLOWED_ROLES_MAX: Final = 16
RATE_PER_MINUTE_MAX: Final = 100_000
CACHE_SECONDS_MAX: Final = 86400
REPORT_ITERATIONS_MAX: Final = 1_000_000
REPORT_SECONDS_MIN: Final = 0.5
REPORT_SECONDS_MAX: Final = 365 * 86_400.0
APPROVALS_MAX: Final = 5

# A dot separates a source from its tool. The longest name with a dot is one character shorter, because models see the
# dot as two underscores.
_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}|(?=.{3,63}\Z)[a-zA-Z0-9_-]+\.[a-zA-Z0-9_-]+", re.ASCII)
# Tab, line feed and carriage return are allowed in text; other control characters are not.
CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
VERSION_MAX: Final = 2**31 - 1

_MOST: Final = {
    "result_bytes_max": RESULT_BYTES_MAX,
    "rate_per_minute": RATE_PER_MINUTE_MAX,
    "cache_seconds": CACHE_SECONDS_MAX,
    "approvals_required": APPROVALS_MAX,
}
_TIMEOUTS: Final = {"timeout_seconds": TIMEOUT_SECONDS_MAX, "async_timeout_seconds": ASYNC_TIMEOUT_SECONDS_MAX}
_IDS_MOST: Final = {
    "allowed_user_ids": (ALLOWED_USERS_MAX, "user ids"),
    "allowed_roles": (ALLOWED_ROLES_MAX, "names of roles"),
}
# The registry can count and cache only calls that it runs itself.
_OF_BACKEND: Final = ("result_bytes_max", "rate_per_minute", "cache_seconds", "async_timeout_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """A tool's definition.

    If `timeout_seconds` is 0, the run's tool timeout applies. If `result_bytes_max` is 0, Pawl's maximum applies.
    """

    name: str
    description: str
    arguments_schema: Mapping[str, Any]
    context: ExecutionContext = ExecutionContext.BACKEND
    category: Category = Category.SENSITIVE
    effect: EffectClass = EffectClass.AT_MOST_ONCE
    timeout_seconds: float = 0.0
    parallel: bool = False
    resource_keys: tuple[str, ...] = ()
    result_bytes_max: int = 0
    allowed_user_ids: tuple[str, ...] = ()
    # The user needs one of these roles. Empty means any.
    allowed_roles: tuple[str, ...] = ()
    # Average number of executions per minute and store. 0 means unlimited.
    rate_per_minute: int = 0
    # For this time, the result of a READ_ONLY tool is reused for the same user and arguments.
    cache_seconds: float = 0.0
    # Number of different users who must approve a gated call. 0 means one.
    approvals_required: int = 0
    offer_fallback: OfferFallback = OfferFallback.FAIL
    fallback_tool_name: str = ""
    # Path to the affected items in the arguments, such as `$.body.items`. If empty, the longest array is used.
    bulk_count: str = ""
    # Calls run in the foreground even if the model requests the background.
    without_background: bool = False
    # Timeout of background executions. 0 means that there is no separate timeout.
    async_timeout_seconds: float = 0.0
    # True if one approval can cover a series of calls even though the tool is DESTRUCTIVE.
    permits_grants: bool = False
    # Default report policy of its jobs. None means that every iteration is reported.
    reports: ReportPolicy | None = None

    def may_be_called_by(self, user_id: UserId, roles: frozenset[str]) -> bool:
        """Return whether a user with these roles may call the tool. The tool is hidden from other users."""
        is_one_of_them = not self.allowed_user_ids or user_id in self.allowed_user_ids
        return is_one_of_them and (not self.allowed_roles or not roles.isdisjoint(self.allowed_roles))

    @property
    def runs_beside_others(self) -> bool:
        return self.parallel or self.effect is EffectClass.READ_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolVersion:
    """One version of a definition. Never changes."""

    # Empty for a loaded tool, which is the same in every store.
    store_id: StoreId
    definition: ToolDefinition
    version: int
    # `builtin`, `module:<name>`, `store` (front-end tools), or `<kind>:<name>` for a source of the store.
    source: str
    create_time: float
    # Opaque data that the source needs to run the tool.
    binding: bytes = b""
    # The user who registered it. Empty for tools of the deployment or of a source.
    user_id: UserId = UserId("")

    @property
    def source_kind(self) -> str:
        return self.source.partition(":")[0]


def can_exist(name: str, version: int = 0) -> bool:
    """Return whether a tool can have this name and version. If not, callers can skip the database query."""
    return _NAME.fullmatch(name) is not None and version <= VERSION_MAX


def check_own_name(name: str) -> None:
    """Reject a name that is reserved for tools from external sources.

    Raises:
        InvalidField: The name contains a dot.
    """
    if "." in name:
        raise InvalidField(
            "name must not contain a dot: dots are reserved for tools from external sources", field="name"
        )


def check_definition(definition: ToolDefinition) -> None:
    """Validate every field except the schema, which `rules.schema` checks.

    Raises:
        InvalidField: A field is invalid. The `field` metadata names the first one.
    """
    require(
        can_exist(definition.name),
        "name",
        "must have 1 to 64 letters, digits, _ and -; a name with a dot inside may have 63 characters",
    )
    require(
        1 <= len(definition.description.encode()) <= DESCRIPTION_BYTES_MAX,
        "description",
        f"must be 1 to {DESCRIPTION_BYTES_MAX} bytes",
    )
    require(CONTROL.search(definition.description) is None, "description", "must not contain control characters")
    for field, most in _TIMEOUTS.items():
        seconds = getattr(definition, field)
        is_in_range = seconds == 0 or TIMEOUT_SECONDS_MIN <= seconds <= most
        require(is_in_range, field, f"must be 0, or between {TIMEOUT_SECONDS_MIN} and {most:g}")
    for field, most in _MOST.items():
        require(0 <= getattr(definition, field) <= most, field, f"must be between 0 and {most}")
    for field, (most, what) in _IDS_MOST.items():
        ids = getattr(definition, field)
        require(len(ids) <= most and all(map(is_id, ids)), field, f"must have at most {most} {what}")
    require(
        not definition.cache_seconds or definition.effect is EffectClass.READ_ONLY,
        "cache_seconds",
        "is only for tools with the effect READ_ONLY",
    )
    for field in _OF_BACKEND:
        is_fit = definition.context is ExecutionContext.BACKEND or not getattr(definition, field)
        require(is_fit, field, "is only for BACKEND tools")
    _check_reports(definition)
    # A question does not need approval.
    require(
        definition.context is not ExecutionContext.HUMAN or not definition.approvals_required,
        "approvals_required",
        "is not allowed for HUMAN tools",
    )
    require(
        len(definition.resource_keys) <= RESOURCE_KEYS_MAX,
        "resource_keys",
        f"must have at most {RESOURCE_KEYS_MAX} templates",
    )
    for template in definition.resource_keys:
        require(CONTROL.search(template) is None, "resource_keys", "must not contain control characters")
        problem = check_template(template, definition.arguments_schema)
        require(not problem, "resource_keys", problem)
    wants_tool = definition.offer_fallback is OfferFallback.BACKEND_TOOL
    require(
        bool(definition.fallback_tool_name) == wants_tool,
        "fallback_tool_name",
        "must be set for the fallback BACKEND_TOOL, and only for it",
    )


def _check_reports(definition: ToolDefinition) -> None:
    if definition.reports is None:
        return
    has_jobs = definition.context in {ExecutionContext.BACKEND, ExecutionContext.AGENT}
    require(has_jobs and not definition.without_background, "reports", "is only for tools that run in the background")
    check_report_policy(definition.reports)


def check_report_policy(policy: ReportPolicy) -> None:
    """Validate a report policy.

    Raises:
        InvalidField: A value is out of range, or is set although `reports` does not use it.
    """
    is_in_range = 0 <= policy.report_iterations <= REPORT_ITERATIONS_MAX
    is_each = policy.reports is JobReports.EVERY or not policy.report_iterations
    require(
        is_in_range and is_each,
        "reports",
        f"report_iterations must be between 0 and {REPORT_ITERATIONS_MAX}, and requires EVERY",
    )
    if policy.reports is JobReports.PROGRESS:
        problem = job_reports.progress_problem(policy.report_percents, policy.report_seconds)
        require(not problem, "reports", problem)
        return
    require(not policy.report_percents, "reports", "report_percents requires PROGRESS")
    is_digest = policy.reports is JobReports.DIGEST
    seconds = policy.report_seconds
    is_fit = REPORT_SECONDS_MIN <= seconds <= REPORT_SECONDS_MAX if is_digest else not seconds
    limits = f"{REPORT_SECONDS_MIN:g} to {REPORT_SECONDS_MAX:.0f} seconds"
    require(is_fit, "reports", f"DIGEST, and only DIGEST, takes {limits}")


def is_laxer(new: ToolDefinition, old: ToolDefinition) -> bool:
    """Return whether `new` is laxer: it requires approval less often, or allows additional users to call the tool."""
    return (
        SEVERITY.index(new.category) < SEVERITY.index(old.category)
        or max(1, new.approvals_required) < max(1, old.approvals_required)
        or (new.effect is EffectClass.READ_ONLY and old.effect is not EffectClass.READ_ONLY)  # READ_ONLY is never bulk.
        or _is_wider(new.allowed_user_ids, old.allowed_user_ids)
        or _is_wider(new.allowed_roles, old.allowed_roles)
    )


def is_restricted(definition: ToolDefinition) -> bool:
    """Return whether calls need approval or are restricted to certain users."""
    is_gated = definition.category is not Category.SAFE or definition.approvals_required > 1
    return is_gated or bool(definition.allowed_user_ids) or bool(definition.allowed_roles)


def _is_wider(new: tuple[str, ...], old: tuple[str, ...]) -> bool:
    """Return whether `new` includes any user that `old` excludes. An empty set includes all users."""
    return bool(old) and (not new or not set(new) <= set(old))


def require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as the rule it states
    """Raise InvalidField if a field breaks a rule."""
    if not holds:
        raise InvalidField(sentence(field, rule), field=field)


def sentence(field: str, rule: str) -> str:
    """Return a sentence about a field.

    A rule that starts with "must" or "is" follows the field's name directly. Other rules follow a colon.
    """
    return f"{field} {rule}" if rule.startswith(("must ", "is ")) else f"{field}: {rule}"


def encode_definition(definition: ToolDefinition) -> bytes:
    """Return a definition as canonical bytes. Equal definitions have equal bytes."""
    fields: dict[str, JsonValue] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in msgspec.to_builtins(definition).items()
    }
    if definition.reports is not None:
        percents = list(definition.reports.report_percents)
        fields["reports"] = msgspec.to_builtins(definition.reports) | {"report_percents": percents}
    fields["timeout_seconds"] = float(definition.timeout_seconds)
    fields["cache_seconds"] = float(definition.cache_seconds)
    return dumps_canonical(fields)


def decode_definition(fields: JsonValue) -> ToolDefinition:
    return msgspec.convert(fields, ToolDefinition)


def definition_hash(definition: ToolDefinition) -> str:
    """Return the SHA-256, in hex, of a definition. Definitions with the same hash share a version."""
    return hashlib.sha256(encode_definition(definition)).hexdigest()


QUESTION_CHARACTERS_MAX: Final = 4000
OPTIONS_MAX: Final = 20
OPTION_CHARACTERS_MAX: Final = 500


def check_question(question: Question) -> str:
    """Return the problem with a tool's question. Return an empty string if the question is valid."""
    if not 1 <= len(question.question) <= QUESTION_CHARACTERS_MAX:
        return f"a question must be 1 to {QUESTION_CHARACTERS_MAX} characters"
    if len(question.why) > QUESTION_CHARACTERS_MAX:
        return f"the reason for a question must be at most {QUESTION_CHARACTERS_MAX} characters"
    if len(question.options) > OPTIONS_MAX or any(len(o) > OPTION_CHARACTERS_MAX for o in question.options):
        return f"a question must have at most {OPTIONS_MAX} options, each of at most {OPTION_CHARACTERS_MAX} characters"
    return ""


def given(answers: Sequence[Answer], position: int, question: Question) -> int | None:
    """Return the index of the first answer to exactly this question, starting at `position`.

    Return None if there is none. Earlier answers belong to other questions, from an earlier execution of the tool.
    """
    return next(
        (number for number in range(position, len(answers)) if answers[number].question == question.question), None
    )
