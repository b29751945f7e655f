"""A tool call as the ledger has it. Names and meanings are those of pawl.event.v1."""

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
    """What a person did: who, and by which credential and delegate; empty if not known, or for none."""

    user_id: UserId
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")


class Decided(ByPerson, frozen=True, kw_only=True):
    """The decision about a call, with the person and the time."""

    kind: DecisionKind
    reason: str = ""
    time: float = 0.0
    arguments_sha256: str = ""
    """Of the arguments that it is about, in hex; empty where it is not known."""
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
