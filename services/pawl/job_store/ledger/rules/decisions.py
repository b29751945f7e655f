"""Checks and applies a user's decision on a gated call, or the answer to a question."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CommandId, UserId
from pawl.errors import AlreadyDecided, CallNotPending, PawlError, PermissionDenied
from pawl.job_store.ledger.rules import grants, inbox
from pawl.job_store.ledger.rules.approval import Actor, Decision
from pawl.job_store.ledger.rules.calls import arguments_sha256, is_same_credential, people_of
from pawl.job_store.ledger.rules.inbox import Refused
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.values import CallState, CommandOutcome, DecisionKind, DecisionRight, Series

_WITH_KEYS: Final = "using a key also counts as an action by its creators"


class Decide(msgspec.Struct, frozen=True, kw_only=True):
    name: ClassVar[str] = "decision"
    call_id: CallId
    kind: DecisionKind
    digest: str
    arguments: bytes
    edited_digest: str
    reason: str
    right: DecisionRight = DecisionRight.OWN_RUNS
    for_series: bool = False
    edited_series: Series | None = None


class Decider(Actor, frozen=True, kw_only=True):
    command_id: CommandId

    def decide(self, run: RunRow, call: CallRow, command: Decide, now: datetime) -> CallRow:
        """Return the call with the decision or, if more people must approve it, with one more approval."""
        self._check_decidable(run, call, command, now)
        if call.state is CallState.ASKED and call.start_time is not None:
            return call  # The question comes from the tool, so an earlier decision about the call itself remains valid.
        edits = command.kind is DecisionKind.EDIT
        decision = Decision(
            command_id=self.command_id,
            kind=command.kind,
            user_id=self.user_id,
            reason=command.reason,
            time=now,
            digest=command.edited_digest if edits else call.digest,
            arguments_sha256=arguments_sha256(command.arguments if edits else call.arguments),
            credential_id=self.credential_id,
            delegate_user_id=self.delegate_user_id,
            people=self.people,
            series=command.edited_series if edits else call.series if command.for_series else None,
        )
        if call.state is CallState.ASKED or command.kind not in {DecisionKind.APPROVE, DecisionKind.EDIT}:
            return replace(call, decision=decision)
        if edits:
            # Approvals of the call before the edit do not count for the edited call, but are kept on record.
            call = replace(call, approvals=(), earlier_approvals=(*call.earlier_approvals, *call.approvals))
        approvals = (*call.approvals, decision)
        is_last = edits or len(approvals) >= call.approvals_required
        return replace(call, approvals=approvals, decision=decision if is_last else None)

    def _check_decidable(self, run: RunRow, call: CallRow, command: Decide, now: datetime) -> None:
        inbox.check_open(call)
        _check_asked(self.user_id, call, command)
        if call.state is CallState.ASKED:
            if command.kind not in {DecisionKind.ANSWER, DecisionKind.REJECT}:
                raise Refused(CommandOutcome.REFUSED, CallNotPending("a question can only be answered or rejected"))
        elif call.state is not CallState.AWAITING_APPROVAL:
            inbox.check_undecided(call)
            raise Refused(CommandOutcome.REFUSED, CallNotPending())
        else:
            self._check_approver(run, call, command)
        inbox.check_deadline(call, now)

    def _check_approver(self, run: RunRow, call: CallRow, command: Decide) -> None:
        if command.right is DecisionRight.QUESTIONS and not call.asked_user_id:
            raise Refused(CommandOutcome.REFUSED, PermissionDenied("this requires the approver or admin role"))
        several = call.approvals_required
        people = {self.user_id, self.delegate_user_id, *self.people} - {UserId("")}
        if several > 1 and not people.isdisjoint(people_of(run).union(run.steered_by)):
            message = f"{several} people who did not start or steer the run must decide on this call: {_WITH_KEYS}"
            raise Refused(CommandOutcome.REFUSED, PermissionDenied(message))
        if several > 1 and is_same_credential(self.credential_id, run.credential_id):
            message = f"your credential started the run: {several} people with different credentials must decide"
            raise Refused(CommandOutcome.REFUSED, PermissionDenied(message))
        try:
            grants.check_shown(call, command.digest, command.kind, for_series=command.for_series)
        except PawlError as error:
            raise Refused(CommandOutcome.REFUSED, error) from None
        if command.kind is not DecisionKind.APPROVE:
            return
        if any(approval.user_id == self.user_id for approval in call.approvals):
            message = f"you have already approved this call: {several} different people must approve it"
            raise Refused(CommandOutcome.LATE, AlreadyDecided(message))
        if not all(people.isdisjoint(people_of(approval)) for approval in call.approvals):
            message = f"you have approved this call as another user: {several} people must approve it ({_WITH_KEYS})"
            raise Refused(CommandOutcome.REFUSED, PermissionDenied(message))
        if any(is_same_credential(self.credential_id, approval.credential_id) for approval in call.approvals):
            message = f"your credential has approved this call: {several} people with different credentials must do so"
            raise Refused(CommandOutcome.REFUSED, PermissionDenied(message))


def _check_asked(user_id: UserId, call: CallRow, command: Decide) -> None:
    """Check that this user may decide. If the call names a user, only that user may."""
    asked = call.asked_user_id
    if asked == "" and command.right is not DecisionRight.STORE:
        raise Refused(CommandOutcome.REFUSED, PermissionDenied("this requires the approver or admin role"))
    if asked and asked != user_id:
        raise Refused(CommandOutcome.REFUSED, PermissionDenied(f"only {asked} can decide on this call"))
