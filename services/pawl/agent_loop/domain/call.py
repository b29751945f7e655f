"""A tool call as the ledger has it. Names and meanings are those of pawl.event.v1."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from pawl.chassis.ids import CallId, ClientId, ConversationId, CredentialId, RunId, StoreId, UserId


class CallState(StrEnum):
    """The states of a call."""

    PROPOSED = "PROPOSED"
    AWAITING_APPROVAL = "AWAITING_APPROVAL"
    OFFERED = "OFFERED"
    ASKED = "ASKED"
    RUNNABLE = "RUNNABLE"
    RUNNING = "RUNNING"
    DELEGATED = "DELEGATED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"
    OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
    DETACHED = "DETACHED"


SETTLED: Final = frozenset(
    {
        CallState.SUCCEEDED,
        CallState.FAILED,
        CallState.REJECTED,
        CallState.EXPIRED,
        CallState.CANCELLED,
        CallState.OUTCOME_UNKNOWN,
        CallState.DETACHED,
    }
)
"""The states that never change; a call in one of them has its result."""


WITH_PEOPLE: Final = frozenset({CallState.AWAITING_APPROVAL, CallState.ASKED, CallState.OFFERED})
"""States in which a call waits for a person, or for a front end."""


class ExecutionContext(StrEnum):
    """The places where a tool can run."""

    UNSPECIFIED = "UNSPECIFIED"
    BACKEND = "BACKEND"
    FRONTEND = "FRONTEND"
    HUMAN = "HUMAN"
    AGENT = "AGENT"


class ToolCategory(StrEnum):
    """The degrees of harm that a tool can do."""

    UNSPECIFIED = "UNSPECIFIED"
    SAFE = "SAFE"
    SENSITIVE = "SENSITIVE"
    DESTRUCTIVE = "DESTRUCTIVE"


class EffectClass(StrEnum):
    """The class of a call's effect: what may be done when it is unknown whether the call had it."""

    UNSPECIFIED = "UNSPECIFIED"
    READ_ONLY = "READ_ONLY"
    IDEMPOTENT = "IDEMPOTENT"
    RECONCILABLE = "RECONCILABLE"
    AT_MOST_ONCE = "AT_MOST_ONCE"


REPEATABLE: Final = frozenset({EffectClass.READ_ONLY, EffectClass.IDEMPOTENT})
"""Classes whose calls may run again without asking whether they ran before."""


class OfferFallback(StrEnum):
    """The fate of a front-end call that nobody ran in time."""

    FAIL = "FAIL"
    BACKEND_TOOL = "BACKEND_TOOL"
    ASK_USER = "ASK_USER"


class QuestionKind(StrEnum):
    """The kinds of question, by what they want."""

    CLARIFICATION = "CLARIFICATION"
    PERMISSION = "PERMISSION"
    CONFIRMATION = "CONFIRMATION"


class DecisionKind(StrEnum):
    """The kinds of decision that a person makes about a call."""

    APPROVE = "APPROVE"
    EDIT = "EDIT"
    REJECT = "REJECT"
    ANSWER = "ANSWER"


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of a job, as they are shown to be granted. See pawl.event.v1.Series."""

    digest: str = ""
    interval_seconds: float
    iterations_max: int
    end_time: float | None = None
    grant_call_id: CallId = CallId("")
    """The call with which they were granted; for the registry alone."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a call, with the person and the time."""

    kind: DecisionKind
    user_id: UserId
    reason: str = ""
    time: float = 0.0
    arguments_sha256: str = ""
    """Of the arguments that it is about, in hex; empty where it is not known."""
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")
    series: Series | None = None
    """The series that it is about, with the call; None if it is about the call alone."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request to decide, and who approved it so far as this process knows: the ledger counts."""

    digest: str
    preview: str = ""
    cause: str = ""
    decision: Decided | None = None
    approvals_required: int = 1
    approvals: tuple[Decided, ...] = ()
    earlier_approvals: tuple[Decided, ...] = ()
    """Of what the call was before it was edited."""
    escalated: bool = False
    series: Series | None = None
    """The series that can be granted with the call, or under whose grant it runs."""

    @property
    def edited(self) -> bool:
        """True if somebody changed the arguments."""
        decided = (*self.approvals, self.decision) if self.decision else self.approvals
        return any(decision.kind is DecisionKind.EDIT for decision in decided)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question of a call to a person."""

    question: str
    why: str = ""
    kind: QuestionKind = QuestionKind.CLARIFICATION
    options: tuple[str, ...] = ()
    default_answer: str = ""
    timeout_seconds: float = 0.0
    answer_schema_json: bytes = b""
    """The schema that an answer must meet; empty if any will do."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a question that a running tool asked."""

    question: str
    answer: str = ""
    declined: bool = False


class OfferLease(msgspec.Struct, frozen=True, kw_only=True):
    """The hold of a client on a front-end call."""

    client_id: ClientId = ClientId("")
    offer_epoch: int = 0
    expire_time: float = 0.0


class Inverse(msgspec.Struct, frozen=True, kw_only=True):
    """The call that takes the effect of another one back; `summary` says to people, in one line, what it does."""

    tool_name: str
    arguments_json: bytes
    summary: str = ""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call; `content_json` is strict JSON. The model is not told of `inverse`."""

    content_json: bytes
    is_error: bool = False
    error_reason: str = ""
    note: str = ""
    inverse: Inverse | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call. Times are seconds since 1970 by the database's clock."""

    store_id: StoreId
    conversation_id: ConversationId
    run_id: RunId
    call_id: CallId
    round: int
    index: int
    tool_name: str
    state: CallState
    provider_call_id: str = ""
    proposed_tool_name: str = ""
    """The name that the model used, where another tool took its place; else empty."""
    undoes_call_id: CallId = CallId("")
    """The call whose effect this one takes back; empty unless the run is an undo."""
    tool_version: int = 0
    context: ExecutionContext = ExecutionContext.UNSPECIFIED
    category: ToolCategory = ToolCategory.UNSPECIFIED
    effect_class: EffectClass = EffectClass.UNSPECIFIED
    arguments_json: bytes = b""
    proposed_arguments: str = ""
    attempt: int = 0
    parallel: bool = False
    resource_keys: tuple[str, ...] = ()
    timeout_seconds: float = 0.0
    deadline_time: float | None = None
    approval: ApprovalRequest | None = None
    question: Question | None = None
    offer: OfferLease | None = None
    offer_fallback: OfferFallback = OfferFallback.FAIL
    fallback_tool_name: str = ""
    result: CallResult | None = None
    create_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    rule_id: str = ""
    agent_name: str = ""
    """The agent of its run; empty for the `default` of the deployment."""
    """The rule that decided about it in place of a person, or asked for the person."""
    child_run_id: RunId = RunId("")
    """The run that does it; only of a call that is or was DELEGATED, or is DETACHED."""
    imported: bool = False
    """True if it was made elsewhere: here it was never anything but settled."""

    @property
    def name_for_model(self) -> str:
        """The name of the tool as the model used it."""
        return self.proposed_tool_name or self.tool_name

    @property
    def settled(self) -> bool:
        """True if the call has its result."""
        return self.state in SETTLED

    @property
    def asks_in_mid_execution(self) -> bool:
        """True if its tool runs and asks a person something: it is asked on behalf of the tool, not of the model."""
        return self.state is CallState.ASKED and self.attempt > 0

    @property
    def approved_digest(self) -> str:
        """The digest of the approval that was given, empty if none was."""
        decision = self.approval.decision if self.approval else None
        if self.approval is None or decision is None:
            return ""
        return self.approval.digest if decision.kind in {DecisionKind.APPROVE, DecisionKind.EDIT} else ""

    @property
    def granted_series(self) -> Series | None:
        """The series whose grant covers the call, once it may begin: given with it, or before it was made."""
        if self.approval is None:
            return None
        decision = self.approval.decision
        return self.approval.series if decision is None or decision.series is not None else None
