"""Grants. A grant is one approval for all calls of a series.

A job repeats one call, and the approver of that call may approve the whole series. Later calls are then created under
this grant. Each must be identical to the approved call and counts once, up to the granted number (I9, I10). The job's
run stores the grant, so it outlives the calls. The grant ends when the series requests approval again.
"""

from __future__ import annotations

from msgspec.structs import replace

from pawl.errors import DigestMismatch, DigestRequired, GrantNotOffered
from pawl.job_store.ledger.rules import call_table
from pawl.job_store.ledger.rules.approval import Grant
from pawl.job_store.ledger.rules.calls import CallChange, approvers, arguments_sha256
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.values import CallState, DecisionKind


def check_shown(call: CallRow, digest: str, kind: DecisionKind, *, for_series: bool) -> None:
    """Check that a decision refers to what was shown: the call, or the series that it can grant.

    Raises:
        GrantNotOffered: The call offers no series.
        DigestRequired: The decision has no digest.
        DigestMismatch: The digest differs, or the decision is for the series while earlier approvals were for the call,
            or vice versa.
    """
    if for_series and call.series is None:
        raise GrantNotOffered
    if not digest:
        raise DigestRequired
    if digest != (call.series.digest if for_series and call.series else call.digest):
        raise DigestMismatch
    is_approval = kind is DecisionKind.APPROVE
    if is_approval and any((approval.series is not None) != for_series for approval in call.approvals):
        one, other = ("the call alone", "the series") if for_series else ("the series", "the call alone")
        raise DigestMismatch(
            f"earlier approvals are for {one}, not for {other}: approve {one} too, or edit the call to start over"
        )


def covers(run: RunRow, change: CallChange) -> bool:
    """Return whether the run's grant covers a new call and has as many approvals as are now required."""
    grant = run.grant
    return (
        grant is not None
        and not grant.ended
        and (change.approvals_required <= 1 or approvers(run, grant.approvals) >= change.approvals_required)
        and change.series == grant.series
        and (change.tool_name, change.tool_version) == (grant.tool_name, grant.tool_version)
        and arguments_sha256(change.arguments) == grant.arguments_sha256
        # A call counts once: each round has one call, and rounds never repeat.
        and change.round > grant.round
        and grant.uses < grant.series.iterations_max
    )


def counted(run: RunRow, before: CallRow | None, call: CallRow) -> RunRow:
    grant = run.grant
    if before is None and call.state is CallState.AWAITING_APPROVAL:
        return run if grant is None else replace(run, grant=replace(grant, ended=True))
    has_started = before is not None and before.state is not CallState.AWAITING_APPROVAL
    if has_started or call.series is None or call.state not in call_table.STARTED:
        return run
    if before is None:
        used = None if grant is None else replace(grant, uses=grant.uses + 1, round=call.round)
        return replace(run, grant=used)
    if call.decision is None or call.decision.series is None:
        return run
    is_edited = any(approval.kind is DecisionKind.EDIT for approval in call.approvals)
    is_same = grant is not None and grant.series.digest == call.series.digest
    given = Grant(
        series=call.series,
        call_id=call.call_id,
        tool_name=call.tool_name,
        tool_version=call.tool_version,
        arguments_sha256=arguments_sha256(call.arguments),
        approvals=call.approvals,
        uses=(grant.uses if grant is not None and is_same else 0) + 1,
        round=call.round,
        arguments=call.arguments if is_edited else grant.arguments if grant is not None else b"",
    )
    return replace(run, grant=given)
