"""Tools, calls and executions as the registry has them. Meanings are those of pawl.tool.v1."""

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
    """A tool version as the model is told of it."""

    name: str
    version: int
    description: str = ""
    arguments_schema_json: bytes = b""
    fallback_tool_name: str = ""
    context: ExecutionContext | None = None
    own_definition: bytes = b""
    """The definition as the contract has it, of a tool that came with its run; empty for one of the register."""
    definition_sha256: str = ""
    """The digest of that."""

    @property
    def is_own(self) -> bool:
        """True if it came with its run."""
        return bool(self.definition_sha256)


class ProposedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call to be checked, `edited` by somebody or not; a version of 0 means that the run has no such tool."""

    call_id: CallId
    tool_name: str
    tool_version: int
    arguments_json: bytes
    edited: bool = False
    own_tool: Tool | None = None
    """The tool, if it came with the run."""
    series: Series | None = None
    """The series of which it is a call."""


TOOLS_MAX: Final = 128
"""Tools of a run: more are taken by few model servers."""


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """Tools that were asked for, and how many more there are."""

    tools: tuple[Tool, ...]
    left_out: int = 0


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a person or a front end did about a call, for the audit chain."""

    call_id: CallId
    tool_name: str
    tool_version: int
    user_id: UserId
    arguments_json: bytes = b""
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    definition_sha256: str = ""
    """As in `PinnedTool`."""


class RecordedDecision(Recorded, frozen=True, kw_only=True):
    """The decision of a person about a gated call."""

    kind: DecisionKind
    arguments_sha256: str = ""
    """In place of the arguments."""
    for_series: bool = False


class RecordedResult(Recorded, frozen=True, kw_only=True):
    """The end of a front-end call: who brought the result or held the call, and how long."""

    content_json: bytes
    state: CallState
    duration_seconds: float
    """Since the lease; 0 without one."""


class ExecutionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an execution."""

    outcome: Outcome
    result: CallResult
    question: Question | None = None
    """The question of the tool, with INPUT_REQUIRED."""
    completion_seconds_left: float = 0.0
    """The time in which somebody may complete it, with AWAITING_COMPLETION."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The registry's verdict on a proposed call."""

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
    without_background: bool = False
    """True if the tool does not run in the background."""
    async_timeout_seconds: float = 0.0
    """The time that it may take there; 0 if it has none of its own."""
    reports: ReportPolicy | None = None
    """The iterations of its jobs that are told where nobody says so; None for each."""
    series_digest: str = ""
    """The digest by which its series can be granted; of a call that may begin, of the grant that covers it."""
    result: ExecutionResult | None = None
    """The end of a call that only reads and has run already."""


ExecutionPiece: TypeAlias = Progress | ExecutionResult


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a cancelled execution: whether nothing of it runs any more, and what it came to."""

    stopped: bool
    result: ExecutionResult | None = None
