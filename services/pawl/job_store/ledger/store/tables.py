"""The columns of each table, and the row fields that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
from asyncpg import Record

from pawl.chassis.ids import ClientId, SessionId
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rules import labels
from pawl.job_store.ledger.rules.approval import Decision, Grant
from pawl.job_store.ledger.rules.background import NO_BACKGROUND, Background
from pawl.job_store.ledger.rules.events import Event
from pawl.job_store.ledger.rules.rows import (
    Attention,
    CallRow,
    CommandRow,
    ConversationRow,
    LastCommit,
    MessageRow,
    Offer,
    OwnTools,
    RequestRow,
    RunRow,
    SegmentRow,
)
from pawl.job_store.ledger.rules.states import AttentionReason, RunProgram, Sharing
from pawl.job_store.ledger.rules.unit_of_work import Table
from pawl.job_store.ledger.store.columns import Column, Columns
from pawl.job_store.schedules.rules import Definition, FireOutcome, FireRow, ScheduleRow
from pawl.job_store.triggers.rules import EventRow, FormerSecret, LaneRow, TriggerDefinition, TriggerRow
from pawl.values import CallState, CommandOutcome, RunState, Series, StopCause

R = TypeVar("R")

_pack: Final = msgspec.msgpack.Encoder().encode


def _same(type_: str, *names: str, fixed: bool = False, heavy: bool = False) -> list[Column[Any]]:
    return [Column(name, type_, attrgetter(name), fixed, heavy) for name in names]


def _fixed(type_: str, *names: str) -> list[Column[Any]]:
    return _same(type_, *names, fixed=True)


def _packed(name: str, kind: Any, *, field: str = "", empty: object = None, fixed: bool = False) -> Column[Any]:
    """Return a column that stores values of a type as MessagePack, or as NULL if they equal `empty`."""
    decode, value_of = msgspec.msgpack.Decoder(kind).decode, attrgetter(field or name)
    return Column(
        name,
        "bytea",
        lambda row: None if (value := value_of(row)) == empty else _pack(value),
        fixed,
        read=lambda packed: empty if packed is None else decode(packed),
        field=field,
    )


def _joined(*names: str, fixed: bool = False) -> list[Column[Any]]:
    return [_joined_one(name, fixed=fixed) for name in names]


def _joined_one(name: str, *, fixed: bool) -> Column[Any]:
    value_of = attrgetter(name)
    return Column(
        name,
        "text",
        lambda row: ",".join(value_of(row)),
        fixed,
        read=lambda text: tuple(filter(None, text.split(","))),
    )


def _enum(name: str, kind: type[IntEnum], *, fixed: bool = False) -> Column[Any]:
    return Column(name, "smallint", attrgetter(name), fixed, read=lambda value: None if value is None else kind(value))


def _encoded(name: str) -> Column[Any]:
    value_of = attrgetter(name)
    return Column(name, "bytea", lambda row: value_of(row).encode(), read=bytes.decode)


def _labels(*, fixed: bool = False) -> Column[Any]:
    return Column(
        "labels",
        "text",
        lambda row: labels.written(row.store_id, row.user_id, row.labels),
        fixed,
        read=labels.read,
    )


def _offer(field: str, default: Any) -> Callable[[CallRow], Any]:
    return lambda call: default if call.offer is None else getattr(call.offer, field)


BACKGROUND: Final = _packed("background", Background, empty=NO_BACKGROUND)
CONVERSATIONS: Final[Columns[ConversationRow]] = Columns(
    "job_store.conversations",
    ConversationRow,
    [
        *_fixed("text", "store_id", "conversation_id", "user_id", "made_title", "parent_run_id", "fork_of"),
        *_fixed("text", "erase_user_id", "parent_conversation_id", "model_title"),
        *_fixed("bytea", "key_hash"),
        *_same("text", "active_run_id", "title", "title_run_id"),
        *_same("boolean", "archived", "shows_arguments"),
        _enum("sharing", Sharing),
        *_joined("queue", "interrupting"),
        *_same("bigint", "last_number"),
        *_fixed("bigint", "past_number"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "update_time", "title_at"),
        _labels(),
        BACKGROUND,
        # For the counts over all conversations.
        Column("notices_pending", "integer", lambda row: row.background.pending),
        Column("notices_entered", "integer", lambda row: row.background.entered),
    ],
    key_length=2,
)

SEGMENTS: Final[Columns[SegmentRow]] = Columns(
    "job_store.conversation_segments",
    SegmentRow,
    [
        *_fixed("text", "store_id", "conversation_id"),
        *_fixed("bigint", "first_number", "last_number"),
        *_fixed("text", "source_conversation_id"),
    ],
    key_length=3,
)


def _run(*, attention: int | None, attention_time: datetime | None, **fields: Any) -> RunRow:
    if attention is None or attention_time is None:
        return RunRow(**fields)
    return RunRow(**fields, attention=Attention(reason=AttentionReason(attention), since_time=attention_time))


RUNS: Final[Columns[RunRow]] = Columns(
    "job_store.runs",
    _run,
    [
        *_fixed("text", "store_id", "run_id", "conversation_id", "user_id", "parent_run_id", "parent_call_id"),
        *_fixed("text", "credential_id", "delegate_user_id", "agent_name", "reports_to", "budget_run_id"),
        *_fixed("text", "root_conversation_id"),
        *_joined("agents_above", fixed=True),
        *_fixed("integer", "generation"),
        _labels(fixed=True),
        *_same("text", "worker_id", "trace"),
        _enum("state", RunState),
        _enum("stop_cause", StopCause),
        _enum("program", RunProgram, fixed=True),
        *_same("integer", "crashes", "command_count", "round", "steers_waiting", "idle_receipts"),
        *_same("integer", "trimmed_rounds", "trimmed_failures", "mark_round"),
        *_same("bigint", "trimmed_log_seq", "mark_seq"),
        *_same("bigint", "epoch", "last_seq", "token_budget", "topped_up_tokens", "steer_bytes_waiting"),
        *_same("bigint", "shared_tokens_used"),
        *_fixed("bigint", "token_ceiling"),
        *_same("double precision", "active_seconds"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "claim_at", "start_time", "end_time", "update_time", "progress_time", "state_time"),
        *_fixed("boolean", "imported", "in_background", "silent"),
        *_fixed("bytea", "options"),
        *_same("bytea", "queued_message", "usage", "failure", "unstopped"),
        *_same("bytea", "tools", "output", heavy=True),
        *_joined("people", fixed=True),
        *_joined("steered_by"),
        Column("waits", "bytea", lambda row: bytes(row.waits), read=tuple),
        Column("attention", "smallint", lambda row: row.attention and row.attention.reason),
        Column("attention_time", "timestamptz", lambda row: row.attention and row.attention.since_time),
        _packed("last_commit", LastCommit),
        _packed("own_tools", OwnTools, fixed=True),
        _packed("series_grant", Grant, field="grant"),
    ],
    key_length=2,
    # The state of the worker, which is opaque to the ledger.
    beside=("loop_state", "bytea", b""),
)

# The total size of the large columns of a RUNS row.
RUN_BYTES: Final = "length(options) + length(tools) + length(output) + coalesce(length(own_tools), 0)"


def _call(
    *,
    offer_client_id: str | None,
    offer_session_id: str,
    offer_epoch: int,
    offer_expire_time: datetime | None,
    offer_lease_seconds: float,
    **fields: Any,
) -> CallRow:
    if offer_client_id is None:
        return CallRow(**fields, offer=None)
    offer = Offer(
        client_id=ClientId(offer_client_id),
        session_id=SessionId(offer_session_id),
        epoch=offer_epoch,
        expire_time=offer_expire_time,
        lease_seconds=offer_lease_seconds,
    )
    return CallRow(**fields, offer=offer)


CALLS: Final[Columns[CallRow]] = Columns(
    "job_store.calls",
    _call,
    [
        *_fixed("text", "store_id", "call_id", "run_id", "conversation_id", "user_id"),
        *_same("text", "digest", "reserved_by", "child_run_id"),
        *_fixed("text", "asked_user_id"),
        _enum("state", CallState),
        *_same("smallint", "approvals_required"),
        *_same("integer", "round", "tool_version", "attempt"),
        *_same("boolean", "escalated", "has_default"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "deadline_time", "start_time", "end_time", "progress_time", "state_time"),
        *_same("bytea", "arguments", "result", "spec", heavy=True),
        Column("batch_index", "integer", attrgetter("index"), field="index"),
        _encoded("tool_name"),
        _encoded("fallback_tool_name"),
        _packed("decision", Decision),
        _packed("approvals", tuple[Decision, ...], empty=()),
        _packed("earlier_approvals", tuple[Decision, ...], empty=()),
        _packed("series", Series),
        Column("offer_client_id", "text", _offer("client_id", None)),
        Column("offer_session_id", "text", _offer("session_id", "")),
        Column("offer_epoch", "bigint", _offer("epoch", 0)),
        Column("offer_expire_time", "timestamptz", _offer("expire_time", None)),
        Column("offer_lease_seconds", "double precision", _offer("lease_seconds", 0.0)),
    ],
    key_length=2,
)


MESSAGES: Final[Columns[MessageRow]] = Columns(
    "job_store.messages",
    MessageRow,
    [
        *_fixed("text", "store_id", "conversation_id"),
        *_fixed("bigint", "number", "summarised_to"),
        *_fixed("text", "message_id", "run_id", "user_id"),
        *_fixed("bytea", "body"),
        *_fixed("timestamptz", "create_time"),
    ],
    key_length=3,
)


COMMANDS: Final[Columns[CommandRow]] = Columns(
    "job_store.commands",
    CommandRow,
    [
        *_fixed("text", "store_id", "run_id", "command_id", "user_id", "name", "call_id", "reason", "message"),
        *_fixed("text", "credential_id", "delegate_user_id"),
        _enum("outcome", CommandOutcome, fixed=True),
        *_fixed("integer", "number"),
        *_fixed("timestamptz", "time"),
        *_fixed("bytea", "fingerprint", "payload"),
        *_same("boolean", "consumed"),
    ],
    key_length=3,
)


REQUESTS: Final[Columns[RequestRow]] = Columns(
    "job_store.requests",
    RequestRow,
    [
        *_fixed("text", "store_id", "user_id", "request_id", "run_id", "conversation_id"),
        *_fixed("bytea", "fingerprint"),
        *_fixed("boolean", "steered"),
        *_fixed("timestamptz", "create_time"),
    ],
    key_length=3,
)


EVENTS: Final[Columns[LogRow]] = Columns(
    "job_store.events",
    LogRow,
    [*_fixed("text", "store_id", "run_id"), *_fixed("bigint", "last_seq", "first_seq"), *_fixed("bytea", "events")],
    key_length=3,
    gathered=True,
)

OUTBOX: Final[Columns[Event]] = Columns(
    "job_store.outbox",
    Event,
    [
        *_fixed("text", "store_id", "run_id"),
        *_fixed("bigint", "seq"),
        *_fixed("text", "event_id"),
        Column("type", "text", lambda event: event.lifecycle_type, fixed=True),
        *_fixed("timestamptz", "time"),
    ],
    key_length=3,
    beside=("payload", "bytea", None),
    gathered=True,
)


def _starter(id_: str, definition: type[Any]) -> list[Column[Any]]:
    return [
        *_fixed("text", "store_id", id_, "user_id", "name"),
        *_same("text", "credential_id", "delegate_user_id", "pause_note", "last_run_id"),
        *_same("bigint", "generation"),
        *_same("integer", "failures"),
        *_same("boolean", "self_paused", "last_run_counted"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "pause_time"),
        *_joined("user_roles", "people"),
        _packed("definition", definition),
        _packed("fires", tuple[FireRow, ...]),
    ]


SCHEDULES: Final[Columns[ScheduleRow]] = Columns(
    "job_store.schedules",
    ScheduleRow,
    [*_starter("schedule_id", Definition), *_same("timestamptz", "due_time", "claim_at", "waiting_time")],
    key_length=2,
)

TRIGGERS: Final[Columns[TriggerRow]] = Columns(
    "job_store.triggers",
    TriggerRow,
    [
        *_starter("trigger_id", TriggerDefinition),
        *_same("bytea", "secret"),
        *_same("timestamptz", "claim_at", "unreachable_time", "unreachable_report_time", "refused_time"),
        *_same("bigint", "uid_validity", "last_uid", "refused_count"),
        *_same("text", "unreachable_reason", "refused_reason"),
        _packed("former_secrets", tuple[FormerSecret, ...]),
    ],
    key_length=2,
)

TRIGGER_EVENTS: Final[Columns[EventRow]] = Columns(
    "job_store.trigger_events",
    EventRow,
    [
        *_fixed("text", "store_id", "trigger_id", "event_id"),
        *_fixed("timestamptz", "receive_time"),
        *_same("timestamptz", "fire_time"),
        _enum("outcome", FireOutcome),
        *_same("text", "reason", "run_id", "conversation_id"),
    ],
    key_length=3,
)

LANES: Final[Columns[LaneRow]] = Columns(
    "job_store.trigger_lanes",
    LaneRow,
    [
        *_fixed("text", "store_id", "trigger_id", "lane"),
        *_same("text", "last_run_id", "event_id", "conversation_key"),
        *_same("bytea", "data", heavy=True),
        *_same("boolean", "awaits_run"),
        *_same("timestamptz", "first_time", "claim_at", "update_time"),
    ],
    key_length=3,
)


def load_into(table: Table[Any, R], columns: Columns[R], records: Iterable[Record]) -> list[R]:
    rows = [columns.read(record) for record in records]
    for row in rows:
        table.load(attrgetter("key")(row), row)
    return rows
