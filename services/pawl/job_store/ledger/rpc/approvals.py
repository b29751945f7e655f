"""Converts approval requests, and users' decisions on them."""

from __future__ import annotations

import hashlib
from typing import Final

from pawl.chassis.ids import CallId, check_id
from pawl.chassis.rpc.translate import Exceptions, Translator
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.rpc.fields import enum_member
from pawl.job_store.ledger.rules.approval import Decision, Grant
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.values import DecisionKind, DecisionRight, Series

# Maximum number of approvals that a call can require.
APPROVALS_MAX: Final = 5
_DIGEST_CHARACTERS: Final = frozenset("0123456789abcdef")

_WIRE: Final = Translator(lambda unknown: InvalidField(f"unknown value {unknown.value}", field=unknown.field))
_SERIES: Final = _WIRE.struct(
    Series, call_pb2.Series, Exceptions(of_message=("grant_call_id",), of_struct=("grant_call_id",))
)
_DECISION: Final = _WIRE.struct(
    Decision,
    call_pb2.Decision,
    Exceptions(
        write={"arguments_sha256": lambda decision: decision.arguments_sha256.hex()},
        of_struct=("command_id", "digest", "arguments_sha256", "people"),
    ),
)
_GRANT: Final = _WIRE.struct(
    Grant,
    call_pb2.Grant,
    Exceptions(of_struct=("tool_name", "tool_version", "arguments_sha256", "round", "arguments")),
)


def series_from(message: call_pb2.Series) -> Series:
    check_digest(message.digest, "series.digest")
    return _SERIES.read(message)


def people_needed(value: int) -> int:
    """Return how many people must approve a call. 0 in the request means one."""
    if value > APPROVALS_MAX:
        raise InvalidField(
            f"approvals_required must be at most {APPROVALS_MAX}, got {value}",
            field="calls.approval.approvals_required",
        )
    return max(1, value)


def check_digest(value: str, field: str) -> str:
    if len(value) != hashlib.sha256().digest_size * 2 or not _DIGEST_CHARACTERS.issuperset(value):
        raise InvalidField("a digest must be a SHA-256 hash in lower-case hexadecimal", field=field)
    return value


def put_approval(message: call_pb2.Call, row: CallRow) -> None:
    if row.digest:
        message.approval.digest = row.digest
        message.approval.approvals_required = row.approvals_required
        message.approval.approvals.extend(map(_DECISION.write, row.approvals))
        message.approval.earlier_approvals.extend(map(_DECISION.write, row.earlier_approvals))
        message.approval.escalated = row.escalated
    if row.series is not None:
        message.approval.series.CopyFrom(_SERIES.write(row.series))
    if row.decision is not None:
        message.approval.decision.CopyFrom(_DECISION.write(row.decision))


def put_grant(message: run_pb2.Run, row: RunRow) -> None:
    grant = row.grant
    if grant is None:
        return
    granted = _GRANT.write(grant)
    message.grant.CopyFrom(granted)
    job = message.job
    job.interval_seconds = grant.series.interval_seconds
    # The job may have been granted fewer iterations than it has completed.
    job.iterations_max = max(grant.series.iterations_max, row.round)
    job.ClearField("end_time")
    if granted.series.HasField("end_time"):
        job.end_time.CopyFrom(granted.series.end_time)
    if grant.arguments:
        job.arguments_json = grant.arguments


def decide(decision: ledger_pb2.DecisionCommand, right: DecisionRight) -> Decide:
    kind = enum_member(DecisionKind, decision.kind, "command.decision.kind")
    if kind is DecisionKind.EDIT:
        if not decision.arguments_json:
            raise InvalidField("an edit requires arguments", field="command.decision.arguments_json")
        check_digest(decision.edited_digest, "command.decision.edited_digest")
    if decision.HasField("edited_series") != (decision.for_series and kind is DecisionKind.EDIT):
        raise InvalidField(
            "edited_series must be set if a series is edited, and unset otherwise",
            field="command.decision.edited_series",
        )
    if kind is DecisionKind.ANSWER and not decision.answer:
        raise InvalidField("an answer must not be empty", field="command.decision.answer")
    return Decide(
        call_id=CallId(check_id(decision.call_id, "command.decision.call_id")),
        kind=kind,
        digest=decision.digest,
        arguments=decision.arguments_json,
        edited_digest=decision.edited_digest,
        reason=decision.reason,
        right=right,
        for_series=decision.for_series,
        edited_series=series_from(decision.edited_series) if decision.HasField("edited_series") else None,
    )
