"""Validates the changes that a run's owner makes to the run's calls.

A gated call has a digest of the store, run, call, tool and arguments. It can start only in exactly the form that was
shown, and only once enough people have approved it, each with a different credential (I9, I10).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any, Final

from msgspec.structs import replace

from pawl.chassis.identity.auth import LOCAL_CREDENTIAL
from pawl.chassis.ids import ClientId, CommandId, CredentialId, UserId
from pawl.errors import IllegalTransition, InboxChanged, InvalidField
from pawl.job_store.ledger.rules import call_table
from pawl.job_store.ledger.rules.approval import Actor, Decision
from pawl.job_store.ledger.rules.events import CallChanged
from pawl.job_store.ledger.rules.rows import CallFields, CallRow, Offer, RunRow
from pawl.values import CallState, DecisionKind, Series

# Credentials that do not identify a person: an unknown one, and the local key of the machine's owner.
SHARED_CREDENTIALS: Final = frozenset({CredentialId(""), CredentialId(LOCAL_CREDENTIAL)})

_APPROVALS: Final = frozenset({DecisionKind.APPROVE, DecisionKind.EDIT})
_STARTED: Final = frozenset({CallState.RUNNING, CallState.DELEGATED})

# States that a call enters together with the run that executes it.
WITH_CHILD: Final = frozenset({CallState.DELEGATED, CallState.DETACHED})


class CallChange(CallFields, frozen=True, kw_only=True):
    only_reads: bool = False


# The other fields are set only by the first change, or by `_shown`.
_OF_OWNER: Final = tuple(
    set(CallFields.__struct_fields__)
    - {"call_id", "round", "index", "approvals_required", "escalated", "asked_user_id"}
)


def arguments_sha256(arguments: bytes) -> bytes:
    return hashlib.sha256(arguments).digest()


def create(run: RunRow, change: CallChange, *, now: datetime, is_granted: bool = False) -> CallRow:
    """Return the row of a new call.

    With `is_granted`, a gated call may start without its own approval.

    Raises:
        IllegalTransition: The call cannot be created in that state, or it is gated and would start.
        InvalidField: The call is settled without a result, or open with one.
    """
    call_table.check(None, change.state)
    _check_result(change)
    _check_child(None, change)
    if change.digest and change.state in call_table.STARTED and not is_granted:
        raise IllegalTransition("a gated call cannot start before it is approved")
    _check_gate_has_digest(change)
    return _row(run, change, now)


def imported(run: RunRow, change: CallChange, *, now: datetime) -> CallRow:
    """Return the row of an imported call, which was settled elsewhere and never changes.

    Raises:
        InvalidField: The call is not settled, or has no result.
    """
    if not change.state.is_terminal:
        raise InvalidField(f"call {change.call_id}: an imported call must be settled", field="calls.state")
    _check_result(change)
    return _row(run, change, now)


def _row(run: RunRow, change: CallChange, now: datetime) -> CallRow:
    return CallRow(
        store_id=run.store_id,
        call_id=change.call_id,
        run_id=run.run_id,
        conversation_id=run.conversation_id,
        user_id=run.user_id,
        round=change.round,
        index=change.index,
        offer=_offer(change.state, None),
        create_time=now,
        start_time=now if change.state in _STARTED else None,
        end_time=now if change.state.is_terminal else None,
        state_time=now,
        approvals_required=max(1, change.approvals_required),
        asked_user_id=change.asked_user_id,
        **_owner_fields(change),
    )


def implied_start(change: CallChange) -> CallChange | None:
    """Return the change that starts a new read-only call, if the call is recorded only after it has ended.

    Only read-only calls may run before they are recorded. For any other call, return None.
    """
    if not (change.only_reads and change.attempt > 0 and change.state.is_terminal):
        return None
    return replace(change, state=CallState.RUNNING, result=None)


def move(run: RunRow, call: CallRow, change: CallChange, consumed: Collection[CommandId], *, now: datetime) -> CallRow:
    """Apply the owner's `change` to the call. Return the new row.

    `consumed` lists the commands that the step consumes.

    Raises:
        InboxChanged: The step does not consume the command that settles or decides on the call.
        IllegalTransition: The state table or the gate does not allow the change.
        InvalidField: See `create`.
    """
    if call.reserved_by and call.reserved_by not in consumed:
        raise InboxChanged
    call_table.check(call.state, change.state)
    if change.state is call.state is CallState.RUNNING and change.attempt <= call.attempt:
        raise IllegalTransition("the attempt number must increase when a call runs again")
    if (call.state, change.state) in call_table.NEEDS_START and call.start_time is None:
        raise IllegalTransition(f"a call that has not started cannot go from {call.state.name} to {change.state.name}")
    if change.state is CallState.SUCCEEDED and call.state in call_table.PENDING and not _is_answered(call):
        raise IllegalTransition(f"the call is {call.state.name} and no result was given")
    if call.state is CallState.DELEGATED and change.state is not CallState.CANCELLED and not call.reserved_by:
        raise IllegalTransition("the run that executes the call has not ended")
    _check_result(change)
    _check_child(call, change)
    _check_gate(run, call, change)
    starts = change.state in _STARTED
    if change.state is CallState.AWAITING_APPROVAL:
        call = _shown(call, change)
    return replace(
        call,
        offer=_offer(change.state, call.offer),
        reserved_by="",
        start_time=now if starts else _start_time(call, change.state),
        end_time=now if change.state.is_terminal else None,
        state_time=call.state_time if change.state is call.state else now,
        **_owner_fields(change),
    )


def lost(call: CallRow, result: bytes, *, now: datetime) -> CallRow:
    """Settle an open call whose run ended without a worker.

    It becomes OUTCOME_UNKNOWN if it may have run, and CANCELLED otherwise.
    """
    may_have_run = call.start_time is not None and CallState.OUTCOME_UNKNOWN in call_table.TRANSITIONS[call.state]
    state = CallState.OUTCOME_UNKNOWN if may_have_run else CallState.CANCELLED
    call_table.check(call.state, state)
    return replace(call, state=state, result=result, offer=None, reserved_by="", end_time=now, state_time=now)


def is_approved(run: RunRow, call: CallRow) -> bool:
    """Return whether enough people have approved exactly this call.

    If two or more people must approve, each person (see `people_of`) and each credential counts once. The person and
    the credential that started the run do not count. People who steered the run are checked when they approve. Steering
    the run later does not withdraw an approval.
    """
    decision = call.decision
    if decision is None or decision.kind not in _APPROVALS:
        return False
    if call.approvals_required == 1:
        return True
    of_it = (each for each in call.approvals if (each.digest, each.series) == (decision.digest, decision.series))
    return approvers(run, of_it) >= call.approvals_required


def approvers(run: RunRow, approvals: Iterable[Decision]) -> int:
    """Return how many people have approved, each with a different credential.

    People who started the run do not count.
    """
    users, credentials, counted = people_of(run), {run.credential_id} - SHARED_CREDENTIALS, 0
    for approval in approvals:
        if users.isdisjoint(people_of(approval)) and approval.credential_id not in credentials:
            users |= people_of(approval)
            credentials |= {approval.credential_id} - SHARED_CREDENTIALS
            counted += 1
    return counted


def people_of(acted: Actor) -> set[UserId]:
    """Return everyone behind an action: the user, the delegate and the creators of the key."""
    return {acted.user_id, acted.delegate_user_id, *acted.people} - {UserId("")}


def is_same_credential(one: CredentialId, other: CredentialId) -> bool:
    """Return whether two credentials are the same and identify a person."""
    return one == other and one not in SHARED_CREDENTIALS


def changed(before: CallRow | None, call: CallRow) -> CallChanged:
    duration = 0.0
    ran = before is not None and (before.state in _STARTED or before.is_leased)
    if ran and call.state.is_terminal:
        start = call.start_time or call.create_time
        duration = max(0.0, ((call.end_time or start) - start).total_seconds())
    return CallChanged(from_state=before.state if before else None, call=call, duration_seconds=duration)


def _owner_fields(change: CallChange) -> dict[str, Any]:
    return {name: getattr(change, name) for name in _OF_OWNER}


def _shown(call: CallRow, change: CallChange) -> CallRow:
    if call.state is not CallState.AWAITING_APPROVAL:
        return replace(
            call,
            decision=None,
            approvals=(),
            earlier_approvals=(),
            approvals_required=max(1, change.approvals_required),
            escalated=False,
        )
    edit = call.decision
    if edit is not None:
        # The user who edited the call has approved what is shown now.
        return replace(call, decision=None, approvals=(edit,))
    return replace(call, escalated=True)


def _is_answered(call: CallRow) -> bool:
    is_asked = call.state is CallState.ASKED
    return bool(call.reserved_by) or (is_asked and (call.has_default or call.start_time is not None))


def _offer(state: CallState, before: Offer | None) -> Offer | None:
    if state is not CallState.OFFERED:
        return before
    return Offer(client_id=ClientId(""), epoch=before.epoch if before else 0, expire_time=None, lease_seconds=0.0)


def _start_time(call: CallRow, state: CallState) -> datetime | None:
    """Return the start time of the call when it moves to `state`.

    Return None if the call leaves OFFERED without being settled.
    """
    return None if call.state is CallState.OFFERED and not state.is_terminal else call.start_time


def _check_result(change: CallChange) -> None:
    if change.state.is_terminal and change.result is None:
        raise InvalidField(f"call {change.call_id}: a settled call must have a result", field="calls.result")
    if not change.state.is_terminal and change.result is not None:
        raise InvalidField(f"call {change.call_id}: only a settled call may have a result", field="calls.result")


def _check_child(call: CallRow | None, change: CallChange) -> None:
    had = call.child_run_id if call is not None else ""
    has_child = change.state in WITH_CHILD
    if has_child and not change.child_run_id:
        raise InvalidField(
            f"call {change.call_id}: a delegated call must have a child_run_id", field="calls.child_run_id"
        )
    if not has_child and change.child_run_id != had:
        raise IllegalTransition("a call's child run is set when the call is delegated, and never changes")


def _check_gate_has_digest(change: CallChange) -> None:
    if change.state is CallState.AWAITING_APPROVAL and not change.digest:
        raise InvalidField(f"call {change.call_id}: an approval must have a digest", field="calls.approval.digest")


def _check_gate(run: RunRow, call: CallRow, change: CallChange) -> None:
    if change.state is CallState.AWAITING_APPROVAL:
        _check_gate_has_digest(change)
        if call.state is CallState.AWAITING_APPROVAL:
            _check_shown_again(call, change)
        return
    if not call.digest:
        if change.digest:
            raise IllegalTransition("only a call that awaits an approval can become gated")
        return
    if _is_fallback(call, change):
        return
    decision = call.decision
    if change.state in call_table.STARTED and not (_is_granted(call) or is_approved(run, call)):
        raise IllegalTransition("a gated call cannot start before it is approved")
    shown = _shown_of(call)
    if decision is not None and decision.kind in _APPROVALS and not change.state.is_terminal:
        shown = _shown_of(call, decision)
    if not _is_same(call, change, shown) and not _is_settled_edit(call, change):
        raise IllegalTransition("a gated call must not change after it is shown to its approvers")


def _check_shown_again(call: CallRow, change: CallChange) -> None:
    """Check that an approval request changes only through a user's edit or a single escalation."""
    shown, edit = _shown_of(call), call.decision
    if edit is not None and edit.kind is DecisionKind.EDIT and call.approvals_required > 1:
        shown = _shown_of(call, edit)
    elif call.reserved_by or call.escalated or not change.escalated:
        raise IllegalTransition("a request for approval can only be edited by an approver, or escalated once")
    if not _is_same(call, change, shown):
        raise IllegalTransition("a gated call must not change after it is shown to its approvers")


def _is_granted(call: CallRow) -> bool:
    has_started = call.state in call_table.STARTED or call.start_time is not None
    return call.series is not None and call.decision is None and has_started


def _shown_of(call: CallRow, decision: Decision | None = None) -> tuple[str, bytes, Series | None]:
    if decision is None:
        return call.digest, arguments_sha256(call.arguments), call.series
    series = decision.series if decision.kind is DecisionKind.EDIT else call.series
    return decision.digest, decision.arguments_sha256, series


def _is_same(call: CallRow, change: CallChange, shown: tuple[str, bytes, Series | None]) -> bool:
    is_same_tool = (change.tool_name, change.tool_version) == (call.tool_name, call.tool_version)
    return is_same_tool and (change.digest, arguments_sha256(change.arguments), change.series) == shown


def _is_fallback(call: CallRow, change: CallChange) -> bool:
    """Return whether the call falls back to a tool because no client ran it. The fallback has its own approval gate."""
    return (
        call.state is CallState.OFFERED
        and change.tool_name == call.fallback_tool_name != call.tool_name
        and not change.digest
    )


def _is_settled_edit(call: CallRow, change: CallChange) -> bool:
    decision = call.decision
    return (
        change.state.is_terminal
        and decision is not None
        and decision.kind is DecisionKind.EDIT
        and _is_same(call, change, _shown_of(call, decision))
    )
