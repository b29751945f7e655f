"""Tool calls in the ledger. Names and meanings follow pawl.event.v1."""

from __future__ import annotations

import msgspec

from pawl.chassis.ids import CallId, ClientId, ConversationId, CredentialId, RunId, StoreId, UserId
from pawl.values import (
    SETTLED,
    CallState,
    Category,
    DecisionKind,
    EffectClass,
    ExecutionContext,
    OfferFallback,
    Question,
    Series,
)


class ByPerson(msgspec.Struct, frozen=True, kw_only=True):
    """The user who performed an action, the credential used, and the delegate who acted for the user.

    Each field may be empty.
    """

    user_id: UserId
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")


class UserDecision(ByPerson, frozen=True, kw_only=True):
    kind: DecisionKind
    reason: str = ""
    time: float = 0.0
    # Digest of the arguments that were decided on, in hex; empty if unknown.
    arguments_sha256: str = ""
    # The series that was decided on with the call; None if the decision was only about the call.
    series: Series | None = None


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a decision, with the approvals known to this process. Only the ledger has all approvals."""

    digest: str
    preview: str = ""
    cause: str = ""
    decision: UserDecision | None = None
    approvals_required: int = 1
    approvals: tuple[UserDecision, ...] = ()
    # Approvals given before the call was edited.
    earlier_approvals: tuple[UserDecision, ...] = ()
    escalated: bool = False
    # The series that can be granted with the call, or whose grant covers it.
    series: Series | None = None

    @property
    def edited(self) -> bool:
        """True if a user changed the arguments."""
        decided = (*self.approvals, self.decision) if self.decision else self.approvals
        return any(decision.kind is DecisionKind.EDIT for decision in decided)


class OfferLease(msgspec.Struct, frozen=True, kw_only=True):
    client_id: ClientId = ClientId("")
    offer_epoch: int = 0
    expire_time: float = 0.0


class Inverse(msgspec.Struct, frozen=True, kw_only=True):
    """A call that reverses another call. `summary` is one human-readable line."""

    tool_name: str
    arguments_json: bytes
    summary: str = ""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call. `content_json` is strict JSON. The model does not see `inverse`."""

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
    # The name that the model used, if the call was changed to another tool; otherwise empty.
    proposed_tool_name: str = ""
    # The call that this call reverses; empty unless the run is an undo.
    undoes_call_id: CallId = CallId("")
    tool_version: int = 0
    context: ExecutionContext | None = None
    category: Category | None = None
    effect_class: EffectClass | None = None
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
    # The run's agent; empty for the deployment's `default`.
    agent_name: str = ""
    # The run that carries out the call, if the call is or was DELEGATED or DETACHED.
    child_run_id: RunId = RunId("")
    # The only user who may decide or answer. Empty for approvers only; None for the usual rules.
    asked_user_id: UserId | None = None
    # True if the call was made elsewhere and imported with its result.
    imported: bool = False

    @property
    def name_for_model(self) -> str:
        return self.proposed_tool_name or self.tool_name

    @property
    def settled(self) -> bool:
        return self.state in SETTLED

    @property
    def asks_in_mid_execution(self) -> bool:
        """True if the running tool itself asked the question, rather than the model."""
        return self.state is CallState.ASKED and self.attempt > 0

    @property
    def approved_digest(self) -> str:
        """The approval's digest, or an empty string if the call was not approved."""
        decision = self.approval.decision if self.approval else None
        if self.approval is None or decision is None:
            return ""
        return self.approval.digest if decision.kind in {DecisionKind.APPROVE, DecisionKind.EDIT} else ""

    @property
    def granted_series(self) -> Series | None:
        """The series whose grant covers this call, or None. Only valid for a call that may start."""
        if self.approval is None:
            return None
        decision = self.approval.decision
        return self.approval.series if decision is None or decision.series is not None else None
