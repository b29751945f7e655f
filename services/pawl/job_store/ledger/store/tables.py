"""The columns of each table and the fields of rows that they hold, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final

import msgspec
from asyncpg import Record

from pawl.chassis.ids import ClientId
from pawl.job_store.ledger.ports import LiveEvent
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
from pawl.job_store.ledger.rules.states import AttentionReason, Sharing
from pawl.job_store.ledger.store.columns import Column, Columns
from pawl.job_store.schedules.rules import Definition, FireOutcome, FireRow, ScheduleRow
from pawl.job_store.triggers.rules import EventRow, FormerSecret, LaneRow, TriggerDefinition, TriggerRow
from pawl.values import CallState, CommandOutcome, RunState, Series, StopCause

_pack: Final = msgspec.msgpack.Encoder().encode
_unpack_decision: Final = msgspec.msgpack.Decoder(Decision).decode
_unpack_approvals: Final = msgspec.msgpack.Decoder(tuple[Decision, ...]).decode
_unpack_series: Final = msgspec.msgpack.Decoder(Series).decode
_unpack_grant: Final = msgspec.msgpack.Decoder(Grant).decode
_unpack_background: Final = msgspec.msgpack.Decoder(Background).decode
_unpack_own_tools: Final = msgspec.msgpack.Decoder(OwnTools).decode
_unpack_definition: Final = msgspec.msgpack.Decoder(Definition).decode
_unpack_trigger: Final = msgspec.msgpack.Decoder(TriggerDefinition).decode
_unpack_secrets: Final = msgspec.msgpack.Decoder(tuple[FormerSecret, ...]).decode
_unpack_fires: Final = msgspec.msgpack.Decoder(tuple[FireRow, ...]).decode
_unpack_last_commit: Final = msgspec.msgpack.Decoder(LastCommit).decode


def _same(type_: str, *names: str, fixed: bool = False, heavy: bool = False) -> list[Column[Any]]:
    """Return columns that hold the fields of their names."""
    return [Column(name, type_, attrgetter(name), fixed, heavy) for name in names]


def _fixed(type_: str, *names: str) -> list[Column[Any]]:
    return _same(type_, *names, fixed=True)


def _packed(value: Any) -> bytes | None:
    return None if value is None else _pack(value)


def _packed_background(of_conversation: Background) -> bytes | None:
    return None if of_conversation == NO_BACKGROUND else _pack(of_conversation)


def _labels(row: RunRow | ConversationRow) -> str:
    return labels.written(row.store_id, row.user_id, row.labels)


def _offer(field: str, default: Any) -> Callable[[CallRow], Any]:
    return lambda call: default if call.offer is None else getattr(call.offer, field)


CONVERSATIONS: Final[Columns[ConversationRow]] = Columns(
    "job_store.conversations",
    [
        *_fixed("text", "store_id", "conversation_id", "user_id", "made_title", "parent_run_id", "fork_of"),
        *_fixed("text", "erase_user_id", "parent_conversation_id", "model_title"),
        *_fixed("bytea", "key_hash"),
        *_same("text", "active_run_id", "title", "title_run_id"),
        *_same("boolean", "archived", "shows_arguments"),
        *_same("smallint", "sharing"),
        Column("queue", "text", lambda row: ",".join(row.queue)),
        Column("interrupting", "text", lambda row: ",".join(row.interrupting)),
        *_same("bigint", "last_number"),
        *_fixed("bigint", "past_number"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "update_time", "title_at"),
        Column("labels", "text", _labels),
        Column("background", "bytea", lambda row: _packed_background(row.background)),
        # For the counts of all conversations.
        Column("notices_pending", "integer", lambda row: row.background.pending),
        Column("notices_entered", "integer", lambda row: row.background.entered),
    ],
    key_length=2,
)

SEGMENTS: Final[Columns[SegmentRow]] = Columns(
    "job_store.conversation_segments",
    [
        *_fixed("text", "store_id", "conversation_id"),
        *_fixed("bigint", "first_number", "last_number"),
        *_fixed("text", "source_conversation_id"),
    ],
    key_length=3,
)


def conversation(record: Record | Mapping[str, Any]) -> ConversationRow:
    """Return the row of a record with the columns of CONVERSATIONS."""
    fields = dict(record)
    for name in ("notices_pending", "notices_entered"):
        del fields[name]
    fields["sharing"] = Sharing(fields["sharing"])
    queue, interrupting = (tuple(fields.pop(name).split(",")) for name in ("queue", "interrupting"))
    fields["labels"] = labels.read(fields["labels"])
    fields["background"] = background(fields["background"])
    return ConversationRow(**fields, queue=tuple(filter(None, queue)), interrupting=tuple(filter(None, interrupting)))


def background(packed: bytes | None) -> Background:
    """Return the background of a conversation, as its column has it."""
    return NO_BACKGROUND if packed is None else _unpack_background(packed)


RUNS: Final[Columns[RunRow]] = Columns(
    "job_store.runs",
    [
        *_fixed("text", "store_id", "run_id", "conversation_id", "user_id", "parent_run_id", "parent_call_id"),
        *_fixed("text", "credential_id", "delegate_user_id", "agent_name", "reports_to", "budget_run_id"),
        *_fixed("integer", "generation"),
        Column("labels", "text", _labels, fixed=True),
        *_same("text", "worker_id"),
        *_same("smallint", "state", "stop_cause"),
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
        Column("people", "text", lambda row: ",".join(row.people), fixed=True),
        Column("steered_by", "text", lambda row: ",".join(row.steered_by)),
        Column("waits", "bytea", lambda row: bytes(row.waits)),
        Column("attention", "smallint", lambda row: row.attention and row.attention.reason),
        Column("attention_time", "timestamptz", lambda row: row.attention and row.attention.since_time),
        Column("last_commit", "bytea", lambda row: _packed(row.last_commit)),
        Column("own_tools", "bytea", lambda row: _packed(row.own_tools), fixed=True),
        Column("series_grant", "bytea", lambda row: _packed(row.grant)),
    ],
    key_length=2,
    # The state of the worker, which the ledger does not look at.
    beside=("loop_state", "bytea", b""),
)

RUN_BYTES: Final = "length(options) + length(tools) + length(output) + coalesce(length(own_tools), 0)"
"""The size of a row of RUNS, as far as it may be large."""


def run(record: Record | Mapping[str, Any]) -> RunRow:
    """Return the row of a record with the columns of RUNS."""
    fields = dict(record)
    last_commit, stop_cause = fields["last_commit"], fields["stop_cause"]
    reason, since_time = fields["attention"], fields.pop("attention_time")
    attention = None if reason is None else Attention(reason=AttentionReason(reason), since_time=since_time)
    fields["attention"] = attention
    fields["state"] = RunState(fields["state"])
    for name in ("people", "steered_by"):
        fields[name] = tuple(filter(None, fields[name].split(",")))
    fields["waits"] = tuple(fields["waits"])
    fields["labels"] = labels.read(fields["labels"])
    fields["stop_cause"] = None if stop_cause is None else StopCause(stop_cause)
    fields["last_commit"] = None if last_commit is None else _unpack_last_commit(last_commit)
    grant = fields.pop("series_grant")
    fields["grant"] = None if grant is None else _unpack_grant(grant)
    fields["own_tools"] = None if fields["own_tools"] is None else _unpack_own_tools(fields["own_tools"])
    return RunRow(**fields)


CALLS: Final[Columns[CallRow]] = Columns(
    "job_store.calls",
    [
        *_fixed("text", "store_id", "call_id", "run_id", "conversation_id", "user_id"),
        *_same("text", "digest", "reserved_by", "child_run_id"),
        *_same("smallint", "state", "approvals_required"),
        *_same("integer", "round", "tool_version", "attempt"),
        *_same("boolean", "escalated", "has_default"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "deadline_time", "start_time", "end_time", "progress_time", "state_time"),
        *_same("bytea", "arguments", "result", "spec", heavy=True),
        Column("batch_index", "integer", lambda row: row.index),
        Column("tool_name", "bytea", lambda row: row.tool_name.encode()),
        Column("fallback_tool_name", "bytea", lambda row: row.fallback_tool_name.encode()),
        Column("decision", "bytea", lambda row: _packed(row.decision)),
        Column("approvals", "bytea", lambda row: _packed(row.approvals or None)),
        Column("earlier_approvals", "bytea", lambda row: _packed(row.earlier_approvals or None)),
        Column("series", "bytea", lambda row: _packed(row.series)),
        Column("offer_client_id", "text", _offer("client_id", None)),
        Column("offer_session_id", "text", _offer("session_id", "")),
        Column("offer_epoch", "bigint", _offer("epoch", 0)),
        Column("offer_expire_time", "timestamptz", _offer("expire_time", None)),
        Column("offer_lease_seconds", "double precision", _offer("lease_seconds", 0.0)),
    ],
    key_length=2,
)


def call(record: Record | Mapping[str, Any]) -> CallRow:
    """Return the row of a record with the columns of CALLS, and perhaps `omitted_bytes`."""
    fields = dict(record)
    fields.pop("omitted_bytes", None)
    offer = Offer(
        client_id=fields.pop("offer_client_id") or ClientId(""),
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
    fields["series"] = None if fields["series"] is None else _unpack_series(fields["series"])
    for name in ("approvals", "earlier_approvals"):
        fields[name] = () if fields[name] is None else _unpack_approvals(fields[name])
    return CallRow(**fields, offer=None if record["offer_client_id"] is None else offer)


MESSAGES: Final[Columns[MessageRow]] = Columns(
    "job_store.messages",
    [
        *_fixed("text", "store_id", "conversation_id"),
        *_fixed("bigint", "number", "summarised_to"),
        *_fixed("text", "message_id", "run_id", "user_id"),
        *_fixed("bytea", "body"),
        *_fixed("timestamptz", "create_time"),
    ],
    key_length=3,
)


def message(record: Record) -> MessageRow:
    """Return the row of a record with the columns of MESSAGES."""
    return MessageRow(**dict(record))


COMMANDS: Final[Columns[CommandRow]] = Columns(
    "job_store.commands",
    [
        *_fixed("text", "store_id", "run_id", "command_id", "user_id", "name", "call_id", "reason", "message"),
        *_fixed("text", "credential_id", "delegate_user_id"),
        *_fixed("smallint", "outcome"),
        *_fixed("integer", "number"),
        *_fixed("timestamptz", "time"),
        *_fixed("bytea", "fingerprint", "payload"),
        *_same("boolean", "consumed"),
    ],
    key_length=3,
)


def command(record: Record | Mapping[str, Any]) -> CommandRow:
    """Return the row of a record with the columns of COMMANDS, and perhaps the time `now`."""
    fields = dict(record)
    fields.pop("now", None)
    fields["outcome"] = CommandOutcome(fields["outcome"])
    return CommandRow(**fields)


REQUESTS: Final[Columns[RequestRow]] = Columns(
    "job_store.requests",
    [
        *_fixed("text", "store_id", "user_id", "request_id", "run_id", "conversation_id"),
        *_fixed("bytea", "fingerprint"),
        *_fixed("boolean", "steered"),
        *_fixed("timestamptz", "create_time"),
    ],
    key_length=3,
)


def request(record: Record) -> RequestRow:
    """Return the row of a record with the columns of REQUESTS."""
    return RequestRow(**dict(record))


EVENTS: Final[Columns[LiveEvent]] = Columns(
    "job_store.events",
    [*_fixed("text", "store_id", "run_id"), *_fixed("bigint", "seq"), *_fixed("bytea", "payload")],
    key_length=3,
    gathered=True,
)

OUTBOX: Final[Columns[Event]] = Columns(
    "job_store.outbox",
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


def _starter(id_: str) -> list[Column[Any]]:
    """Return the columns of what starts runs by itself, with its id."""
    return [
        *_fixed("text", "store_id", id_, "user_id", "name"),
        *_same("text", "credential_id", "delegate_user_id", "pause_note", "last_run_id"),
        *_same("bigint", "generation"),
        *_same("integer", "failures"),
        *_same("boolean", "self_paused", "last_run_counted"),
        *_fixed("timestamptz", "create_time"),
        *_same("timestamptz", "pause_time"),
        Column("user_roles", "text", lambda row: ",".join(row.user_roles)),
        Column("people", "text", lambda row: ",".join(row.people)),
        Column("definition", "bytea", lambda row: _pack(row.definition)),
        Column("fires", "bytea", lambda row: _pack(row.fires)),
    ]


SCHEDULES: Final[Columns[ScheduleRow]] = Columns(
    "job_store.schedules",
    [*_starter("schedule_id"), *_same("timestamptz", "due_time", "claim_at", "waiting_time")],
    key_length=2,
)

TRIGGERS: Final[Columns[TriggerRow]] = Columns(
    "job_store.triggers",
    [
        *_starter("trigger_id"),
        *_same("bytea", "secret"),
        *_same("timestamptz", "claim_at", "unreachable_time", "unreachable_report_time", "refused_time"),
        *_same("bigint", "uid_validity", "last_uid", "refused_count"),
        *_same("text", "unreachable_reason", "refused_reason"),
        Column("former_secrets", "bytea", lambda row: _pack(row.former_secrets)),
    ],
    key_length=2,
)

TRIGGER_EVENTS: Final[Columns[EventRow]] = Columns(
    "job_store.trigger_events",
    [
        *_fixed("text", "store_id", "trigger_id", "event_id"),
        *_fixed("timestamptz", "receive_time"),
        *_same("timestamptz", "fire_time"),
        *_same("smallint", "outcome"),
        *_same("text", "reason", "run_id", "conversation_id"),
    ],
    key_length=3,
)

LANES: Final[Columns[LaneRow]] = Columns(
    "job_store.trigger_lanes",
    [
        *_fixed("text", "store_id", "trigger_id", "lane"),
        *_same("text", "last_run_id", "event_id", "conversation_key"),
        *_same("bytea", "data", heavy=True),
        *_same("boolean", "awaits_run"),
        *_same("timestamptz", "first_time", "claim_at", "update_time"),
    ],
    key_length=3,
)


def schedule(record: Record | Mapping[str, Any]) -> ScheduleRow:
    """Return the row of a record with the columns of SCHEDULES, and perhaps `credential_ended`."""
    fields = _starter_fields(record)
    return ScheduleRow(**fields | {"definition": _unpack_definition(fields["definition"])})


def trigger(record: Record | Mapping[str, Any]) -> TriggerRow:
    """Return the row of a record with the columns of TRIGGERS, and perhaps `credential_ended`."""
    fields = _starter_fields(record)
    fields["definition"] = _unpack_trigger(fields["definition"])
    return TriggerRow(**fields | {"former_secrets": _unpack_secrets(fields["former_secrets"])})


def trigger_event(record: Record | Mapping[str, Any]) -> EventRow:
    """Return the row of a record with the columns of TRIGGER_EVENTS."""
    fields = dict(record)
    return EventRow(**fields | {"outcome": FireOutcome(fields["outcome"])})


def lane(record: Record | Mapping[str, Any]) -> LaneRow:
    """Return the row of a record with the columns of LANES."""
    return LaneRow(**dict(record))


def _starter_fields(record: Record | Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(record)
    for name in ("user_roles", "people"):
        fields[name] = tuple(filter(None, fields[name].split(",")))
    return fields | {"fires": _unpack_fires(fields["fires"])}
