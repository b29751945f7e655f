"""Defines tools and the execution of calls. Meanings match pawl.tool.v1."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import CallId, ConversationId, CredentialId, RunId, StoreId, UserId
from pawl.values.call import Answer, Series


class ExecutionContext(StrEnum):
    """The environment in which a tool runs."""

    BACKEND = "BACKEND"
    FRONTEND = "FRONTEND"
    HUMAN = "HUMAN"
    AGENT = "AGENT"


class Category(StrEnum):
    """The potential harm of a tool. All categories except SAFE require approval."""

    SAFE = "SAFE"
    SENSITIVE = "SENSITIVE"
    DESTRUCTIVE = "DESTRUCTIVE"


class EffectClass(StrEnum):
    """The kind of side effect of a tool. It determines whether a call with an unknown outcome may run again."""

    READ_ONLY = "READ_ONLY"
    IDEMPOTENT = "IDEMPOTENT"
    RECONCILABLE = "RECONCILABLE"
    AT_MOST_ONCE = "AT_MOST_ONCE"

    @property
    def is_journaled(self) -> bool:
        """True if each execution is recorded before it starts."""
        return self in (EffectClass.RECONCILABLE, EffectClass.AT_MOST_ONCE)


# From least to most harmful.
SEVERITY: Final = tuple(Category)
# In the order of the caution that they require, from the least to the most.
CAUTION: Final = tuple(EffectClass)
# Calls of these classes may run again without checking whether they ran before.
REPEATABLE: Final = frozenset({EffectClass.READ_ONLY, EffectClass.IDEMPOTENT})


class OfferFallback(StrEnum):
    """The fallback for a front-end call that no client has run in time."""

    FAIL = "FAIL"
    BACKEND_TOOL = "BACKEND_TOOL"
    ASK_USER = "ASK_USER"


class JobReports(StrEnum):
    """The job iterations that are reported to the job's conversation.

    The end of the job is always reported, except with NONE.
    """

    EVERY = "EVERY"
    CHANGE = "CHANGE"
    END = "END"
    DIGEST = "DIGEST"
    NONE = "NONE"
    PROGRESS = "PROGRESS"


class ReportPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's default for reporting job iterations to conversations. A job can override it.

    `report_iterations` applies to EVERY. If it is n, every n-th iteration is reported. If it is 0, every iteration is
    reported. `report_seconds` applies to DIGEST and is the period that each report covers. PROGRESS reports the
    progress of a job with a single call, either at each of `report_percents` or every `report_seconds`.
    """

    reports: JobReports
    report_iterations: int = 0
    report_seconds: float = 0.0
    report_percents: tuple[int, ...] = ()


class Disposition(StrEnum):
    RUN = "RUN"
    APPROVE = "APPROVE"
    OFFER = "OFFER"
    ASK = "ASK"
    DELEGATE = "DELEGATE"
    REFUSE = "REFUSE"


class Outcome(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    # The call has not ended: its tool has a question for a user.
    INPUT_REQUIRED = "INPUT_REQUIRED"
    # The call has not ended: its tool has returned, and an external system will complete the call.
    AWAITING_COMPLETION = "AWAITING_COMPLETION"


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    store_id: StoreId
    user_id: UserId
    # The conversation whose rules apply. A job uses the conversation it reports to.
    conversation_id: ConversationId
    run_id: RunId
    # The user's roles when the run was started.
    user_roles: frozenset[str] = frozenset()
    # Number of people who must approve each gated call of the run. 0 means one.
    approvals_required: int = 0
    # Empty if unknown.
    agent_name: str = ""
    # The credential that started the run.
    credential_id: CredentialId = CredentialId("")
    # The delegate that started the run for the user. Empty if there is none.
    delegate_user_id: UserId = UserId("")
    # True if the run is a job.
    in_background: bool = False


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A call to execute. Its id makes requests to the registry idempotent."""

    call_id: CallId
    tool_name: str
    tool_version: int
    arguments_json: bytes
    earlier_attempts: int = 0
    unknowns_resolved: int = 0
    timeout_seconds: float = 0.0
    approved_digest: str = ""
    # The rule that decided on the call.
    rule_id: str = ""
    # Answers so far to the tool's questions.
    answers: tuple[Answer, ...] = ()
    # The series whose grant covers the call; None if no grant does.
    series: Series | None = None
    # The trace context for the tool.
    traceparent: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a running tool: a fraction from 0 to 1, or None if unknown, and a human-readable text.

    `has_checkpoint` means that the tool has stored a checkpoint since its last progress report.
    """

    fraction: float | None = None
    message: str = ""
    has_checkpoint: bool = False


class ReadTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """A run's timeouts for reads: the default for tools without a timeout, and the maximum for all tools."""

    timeout_seconds: float
    timeout_seconds_max: float
