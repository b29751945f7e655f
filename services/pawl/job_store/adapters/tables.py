"""The columns of each table and the fields of rows that they hold, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, Final

import msgspec
from asyncpg import Record

from pawl.job_store.adapters.columns import Column, Columns
from pawl.job_store.domain.rows import (
    Attention,
    CallRow,
    CommandRow,
    ConversationRow,
    Decision,
    LastCommit,
    MessageRow,
    Offer,
    RequestRow,
    RunRow,
)
from pawl.job_store.domain.states import AttentionReason, CallState, CommandOutcome, RunState, StopCause

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack_decision: Final = msgspec.msgpack.Decoder(Decision).decode
_unpack_approvals: Final = msgspec.msgpack.Decoder(tuple[Decision, ...]).decode
_unpack_last_commit: Final = msgspec.msgpack.Decoder(LastCommit).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """An event as its row keeps it."""

    store_id: str
    run_id: str
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """A life-cycle event that is to be published."""

    store_id: str
    run_id: str
    seq: int
    event_id: str
    type: str
    time: datetime


def _same(name: str, type_: str, *, fixed: bool = False, heavy: bool = False) -> Column[Any]:
    return Column(name, type_, attrgetter(name), fixed, heavy)


def _fixed(name: str, type_: str) -> Column[Any]:
    return _same(name, type_, fixed=True)


def _packed(value: Any) -> bytes | None:
    return None if value is None else _pack(value)


def _offer(field: str, default: Any) -> Callable[[CallRow], Any]:
    return lambda call: default if call.offer is None else getattr(call.offer, field)


CONVERSATIONS: Final[Columns[ConversationRow]] = Columns(
    "job_store.conversations",
    [
        _fixed("store_id", "text"),
        _fixed("conversation_id", "text"),
        _fixed("user_id", "text"),
        _same("active_run_id", "text"),
        Column("queue", "text", lambda row: ",".join(row.queue)),
        Column("interrupting", "text", lambda row: ",".join(row.interrupting)),
        _same("last_number", "bigint"),
        _fixed("create_time", "timestamptz"),
        _same("update_time", "timestamptz"),
    ],
    key_length=2,
)


def conversation(record: Record) -> ConversationRow:
    """Return the row of a record with the columns of CONVERSATIONS."""
    fields = dict(record)
    queue, interrupting = (tuple(fields.pop(name).split(",")) for name in ("queue", "interrupting"))
    return ConversationRow(**fields, queue=tuple(filter(None, queue)), interrupting=tuple(filter(None, interrupting)))


RUNS: Final[Columns[RunRow]] = Columns(
    "job_store.runs",
    [
        _fixed("store_id", "text"),
        _fixed("run_id", "text"),
        _fixed("conversation_id", "text"),
        _fixed("user_id", "text"),
        _same("state", "smallint"),
        Column("waits", "bytea", lambda row: bytes(row.waits)),
        _same("stop_cause", "smallint"),
        _same("epoch", "bigint"),
        _same("worker_id", "text"),
        _same("claim_at", "timestamptz"),
        _same("crashes", "integer"),
        Column("attention", "smallint", lambda row: row.attention and row.attention.reason),
        Column("attention_time", "timestamptz", lambda row: row.attention and row.attention.since_time),
        _same("last_seq", "bigint"),
        _same("command_count", "integer"),
        _same("round", "integer"),
        _same("active_seconds", "double precision"),
        _same("token_budget", "bigint"),
        _fixed("token_ceiling", "bigint"),
        Column("last_commit", "bytea", lambda row: _packed(row.last_commit)),
        _same("queued_message", "bytea"),
        _fixed("options", "bytea"),
        _same("tools", "bytea", heavy=True),
        _same("usage", "bytea"),
        _same("failure", "bytea"),
        _same("unstopped", "bytea"),
        _same("output", "bytea", heavy=True),
        _fixed("create_time", "timestamptz"),
        _same("start_time", "timestamptz"),
        _same("end_time", "timestamptz"),
        _fixed("parent_run_id", "text"),
        _fixed("parent_call_id", "text"),
        _same("steers_waiting", "integer"),
        _same("steer_bytes_waiting", "bigint"),
        _same("idle_receipts", "integer"),
    ],
    key_length=2,
    # The state of the worker, which the ledger does not look at.
    beside=("loop_state", "bytea"),
)


def run(record: Record | Mapping[str, Any]) -> RunRow:
    """Return the row of a record with the columns of RUNS."""
    fields = dict(record)
    last_commit, stop_cause = fields["last_commit"], fields["stop_cause"]
    reason, since_time = fields["attention"], fields.pop("attention_time")
    attention = None if reason is None else Attention(reason=AttentionReason(reason), since_time=since_time)
    fields["attention"] = attention
    fields["state"] = RunState(fields["state"])
    fields["waits"] = tuple(fields["waits"])
    fields["stop_cause"] = None if stop_cause is None else StopCause(stop_cause)
    fields["last_commit"] = None if last_commit is None else _unpack_last_commit(last_commit)
    return RunRow(**fields)


CALLS: Final[Columns[CallRow]] = Columns(
    "job_store.calls",
    [
        _fixed("store_id", "text"),
        _fixed("call_id", "text"),
        _fixed("run_id", "text"),
        _fixed("conversation_id", "text"),
        _fixed("user_id", "text"),
        _same("round", "integer"),
        Column("batch_index", "integer", lambda row: row.index),
        _same("state", "smallint"),
        Column("tool_name", "bytea", lambda row: row.tool_name.encode()),
        _same("tool_version", "integer"),
        Column("fallback_tool_name", "bytea", lambda row: row.fallback_tool_name.encode()),
        _same("arguments", "bytea", heavy=True),
        _same("attempt", "integer"),
        _same("digest", "text"),
        Column("decision", "bytea", lambda row: _packed(row.decision)),
        _same("deadline_time", "timestamptz"),
        Column("offer_client_id", "text", _offer("client_id", None)),
        Column("offer_session_id", "text", _offer("session_id", "")),
        Column("offer_epoch", "bigint", _offer("epoch", 0)),
        Column("offer_expire_time", "timestamptz", _offer("expire_time", None)),
        Column("offer_lease_seconds", "double precision", _offer("lease_seconds", 0.0)),
        _same("reserved_by", "text"),
        _same("result", "bytea", heavy=True),
        _same("spec", "bytea", heavy=True),
        _fixed("create_time", "timestamptz"),
        _same("start_time", "timestamptz"),
        _same("end_time", "timestamptz"),
        _same("approvals_required", "smallint"),
        Column("approvals", "bytea", lambda row: _packed(row.approvals or None)),
        Column("earlier_approvals", "bytea", lambda row: _packed(row.earlier_approvals or None)),
        _same("escalated", "boolean"),
        _same("has_default", "boolean"),
        _same("child_run_id", "text"),
        _same("progress_time", "timestamptz"),
    ],
    key_length=2,
)


def call(record: Record) -> CallRow:
    """Return the row of a record with the columns of CALLS, and perhaps `omitted_bytes`."""
    fields = dict(record)
    fields.pop("omitted_bytes", None)
    offer = Offer(
        client_id=fields.pop("offer_client_id") or "",
        session_id=fields.pop("offer_session_id"),
        epoch=fields.pop("offer_epoch"),
        expire_time=fields.pop("offer_expire_time"),
        lease_seconds=fields.pop("offer_lease_seconds"),
    )
    fields["index"] = fields.pop("batch_index")
    fields["state"] = CallState(fields["state"])
    fields["tool_name"] = fields["tool_name"].decode()
    fields["fallback_tool_name"] = fields["fallback_tool_name"].decode()
    decision = fields["decision"]
    fields["decision"] = None if decision is None else _unpack_decision(decision)
    for name in ("approvals", "earlier_approvals"):
        fields[name] = () if fields[name] is None else _unpack_approvals(fields[name])
    return CallRow(**fields, offer=None if record["offer_client_id"] is None else offer)


MESSAGES: Final[Columns[MessageRow]] = Columns(
    "job_store.messages",
    [
        _fixed("store_id", "text"),
        _fixed("conversation_id", "text"),
        _fixed("number", "bigint"),
        _fixed("message_id", "text"),
        _fixed("run_id", "text"),
        _fixed("summarised_to", "bigint"),
        _fixed("body", "bytea"),
        _fixed("create_time", "timestamptz"),
    ],
    key_length=3,
)


def message(record: Record) -> MessageRow:
    """Return the row of a record with the columns of MESSAGES."""
    return MessageRow(**dict(record))


COMMANDS: Final[Columns[CommandRow]] = Columns(
    "job_store.commands",
    [
        _fixed("store_id", "text"),
        _fixed("run_id", "text"),
        _fixed("command_id", "text"),
        _fixed("number", "integer"),
        _fixed("user_id", "text"),
        _fixed("time", "timestamptz"),
        _fixed("name", "text"),
        _fixed("call_id", "text"),
        _fixed("fingerprint", "bytea"),
        _fixed("outcome", "smallint"),
        _fixed("reason", "text"),
        _fixed("message", "text"),
        _fixed("payload", "bytea"),
        _same("consumed", "boolean"),
    ],
    key_length=3,
)


def command(record: Record) -> CommandRow:
    """Return the row of a record with the columns of COMMANDS, and perhaps the time `now`."""
    fields = dict(record)
    fields.pop("now", None)
    fields["outcome"] = CommandOutcome(fields["outcome"])
    return CommandRow(**fields)


REQUESTS: Final[Columns[RequestRow]] = Columns(
    "job_store.requests",
    [
        _fixed("store_id", "text"),
        _fixed("user_id", "text"),
        _fixed("request_id", "text"),
        _fixed("fingerprint", "bytea"),
        _fixed("run_id", "text"),
        _fixed("steered", "boolean"),
        _fixed("create_time", "timestamptz"),
    ],
    key_length=3,
)


def request(record: Record) -> RequestRow:
    """Return the row of a record with the columns of REQUESTS."""
    return RequestRow(**dict(record))


EVENTS: Final[Columns[StoredEvent]] = Columns(
    "job_store.events",
    [_fixed("store_id", "text"), _fixed("run_id", "text"), _fixed("seq", "bigint"), _fixed("payload", "bytea")],
    key_length=3,
)

OUTBOX: Final[Columns[OutboxRow]] = Columns(
    "job_store.outbox",
    [
        _fixed("store_id", "text"),
        _fixed("run_id", "text"),
        _fixed("seq", "bigint"),
        _fixed("event_id", "text"),
        _fixed("type", "text"),
        _fixed("time", "timestamptz"),
    ],
    key_length=3,
)
