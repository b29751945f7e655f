"""Tools and the execution of calls. Meanings are those of pawl.tool.v1."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import CallId, ConversationId, CredentialId, RunId, StoreId, UserId
from pawl.values.call import Answer, Series


class ExecutionContext(StrEnum):
    """The places where a tool can run."""

    BACKEND = "BACKEND"
    FRONTEND = "FRONTEND"
    HUMAN = "HUMAN"
    AGENT = "AGENT"


class Category(StrEnum):
    """The degrees of harm that a tool can do; all but SAFE need an approval."""

    SAFE = "SAFE"
    SENSITIVE = "SENSITIVE"
    DESTRUCTIVE = "DESTRUCTIVE"


class EffectClass(StrEnum):
    """The class of a tool's effect: what may be done when nobody knows whether a call had it."""

    READ_ONLY = "READ_ONLY"
    IDEMPOTENT = "IDEMPOTENT"
    RECONCILABLE = "RECONCILABLE"
    AT_MOST_ONCE = "AT_MOST_ONCE"

    @property
    def is_journaled(self) -> bool:
        """True if executions are written down before they begin."""
        return self in (EffectClass.RECONCILABLE, EffectClass.AT_MOST_ONCE)


SEVERITY: Final = tuple(Category)
"""The categories, the least harmful first."""
CAUTION: Final = tuple(EffectClass)
"""The classes, the one that asks for the least caution first."""
REPEATABLE: Final = frozenset({EffectClass.READ_ONLY, EffectClass.IDEMPOTENT})
"""Classes whose calls may run again without asking whether they ran before."""


class OfferFallback(StrEnum):
    """The fate of a front-end call that nobody ran in time."""

    FAIL = "FAIL"
    BACKEND_TOOL = "BACKEND_TOOL"
    ASK_USER = "ASK_USER"


class JobReports(StrEnum):
    """The iterations of a job that are reported to its conversation. Its end is reported except with NONE."""

    EVERY = "EVERY"
    CHANGE = "CHANGE"
    END = "END"
    DIGEST = "DIGEST"
    NONE = "NONE"


class ReportPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of a tool's jobs that are reported to conversations, unless the job says otherwise.

    With EVERY each of so many, 0 for each; with DIGEST those of so many seconds together.
    """

    reports: JobReports
    report_iterations: int = 0
    report_seconds: float = 0.0


class Disposition(StrEnum):
    """The ways in which a call is treated."""

    RUN = "RUN"
    APPROVE = "APPROVE"
    OFFER = "OFFER"
    ASK = "ASK"
    DELEGATE = "DELEGATE"
    REFUSE = "REFUSE"


class Outcome(StrEnum):
    """The ways in which an execution ends."""

    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INPUT_REQUIRED = "INPUT_REQUIRED"
    """It has not ended: the tool asks a person something."""
    AWAITING_COMPLETION = "AWAITING_COMPLETION"
    """It has not ended: its tool has, and somebody outside completes it."""


class RunContext(msgspec.Struct, frozen=True, kw_only=True):
    """The run that calls are about, and on whose behalf."""

    store_id: StoreId
    user_id: UserId
    conversation_id: ConversationId
    """The conversation whose rules hold: for a job the one that it reports to."""
    run_id: RunId
    user_roles: frozenset[str] = frozenset()
    """Those that the user had when the run was started."""
    approvals_required: int = 0
    """People who must approve each gated call of the run; 0 means one."""
    agent_name: str = ""
    """The agent of the run; empty if it is not known."""
    credential_id: CredentialId = CredentialId("")
    """The credential that started the run."""
    delegate_user_id: UserId = UserId("")
    """The user of the delegate that started it for the user; empty for none."""
    in_background: bool = False
    """True if the run is a job."""


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """A call to be run. The registry knows it by its id, whoever asks and however often."""

    call_id: CallId
    tool_name: str
    tool_version: int
    arguments_json: bytes
    earlier_attempts: int = 0
    unknowns_resolved: int = 0
    timeout_seconds: float = 0.0
    approved_digest: str = ""
    rule_id: str = ""
    """The rule that the verdict on the call named."""
    answers: tuple[Answer, ...] = ()
    """The answers so far to the questions that its tool has asked."""
    series: Series | None = None
    """The series whose grant covers the call."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a tool while it runs: how far from 0 to 1 if known, and a text for people."""

    fraction: float | None = None
    message: str = ""


class ReadTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds that a run gives a call whose tool has no timeout, and the most that it gives to any."""

    timeout_seconds: float
    timeout_seconds_max: float
