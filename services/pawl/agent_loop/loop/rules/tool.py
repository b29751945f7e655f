"""The registry's tools, calls and executions. Meanings follow pawl.tool.v1."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.call import CallResult
from pawl.chassis.ids import CallId, CredentialId, UserId
from pawl.values import (
    CallState,
    Category,
    DecisionKind,
    Disposition,
    EffectClass,
    ExecutionContext,
    OfferFallback,
    Outcome,
    Progress,
    Question,
    ReportPolicy,
    Series,
)


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: int
    description: str = ""
    arguments_schema_json: bytes = b""
    fallback_tool_name: str = ""
    context: ExecutionContext | None = None
    # The serialized definition of a client-supplied tool; empty for registered tools.
    own_definition: bytes = b""
    # The digest of `own_definition`.
    definition_sha256: str = ""

    @property
    def is_own(self) -> bool:
        """True if the client supplied the tool with the run."""
        return bool(self.definition_sha256)


class ProposedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call to be checked. `edited` is true if a user changed the call.

    Version 0 means that the run does not have the tool.
    """

    call_id: CallId
    tool_name: str
    tool_version: int
    arguments_json: bytes
    edited: bool = False
    # The tool, if the client supplied it.
    own_tool: Tool | None = None
    # The series that the call belongs to.
    series: Series | None = None
    traceparent: str = ""


# Most model servers do not accept more tools.
TOOLS_MAX: Final = 128


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    tools: tuple[Tool, ...]
    left_out: int = 0


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """An action by a user or front end on a call, to be recorded in the audit chain."""

    call_id: CallId
    tool_name: str
    tool_version: int
    user_id: UserId
    arguments_json: bytes = b""
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    # Same as in `PinnedTool`.
    definition_sha256: str = ""


class RecordedDecision(Recorded, frozen=True, kw_only=True):
    kind: DecisionKind
    # Replaces the arguments.
    arguments_sha256: str = ""
    for_series: bool = False


class RecordedResult(Recorded, frozen=True, kw_only=True):
    """The end of a front-end call. `user_id` is the user who returned the result or held the lease."""

    content_json: bytes
    state: CallState
    # Time from the lease to the end of the call; 0 if the call was never leased.
    duration_seconds: float


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    result: CallResult
    # The tool's question, if the outcome is INPUT_REQUIRED.
    question: Question | None = None
    # How long it can still be completed, if the outcome is AWAITING_COMPLETION.
    completion_seconds_left: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    disposition: Disposition
    tool_version: int = 0
    arguments_json: bytes = b""
    note: str = ""
    context: ExecutionContext | None = None
    category: Category | None = None
    effect_class: EffectClass | None = None
    timeout_seconds: float = 0.0
    parallel: bool = False
    resource_keys: tuple[str, ...] = ()
    digest: str = ""
    preview: str = ""
    approval_cause: str = ""
    question: Question | None = None
    offer_fallback: OfferFallback = OfferFallback.FAIL
    fallback_tool_name: str = ""
    error_reason: str = ""
    error_message: str = ""
    rule_id: str = ""
    approvals_required: int = 0
    # True if the tool cannot run in the background.
    without_background: bool = False
    # The tool's own timeout in the background; 0 if unset.
    async_timeout_seconds: float = 0.0
    # The tool's default report policy for its jobs; None means that each iteration is reported.
    reports: ReportPolicy | None = None
    # The digest needed to grant the call's series, or the digest of the grant that covers the call.
    series_digest: str = ""
    # The result of a read-only call that has already run.
    result: ExecutionResult | None = None


ExecutionPiece: TypeAlias = Progress | ExecutionResult


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a cancellation: whether the execution has stopped, and its result, if any."""

    stopped: bool
    result: ExecutionResult | None = None
