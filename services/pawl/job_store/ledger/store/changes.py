"""Builds the statements that write the changes of units of work."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any, Final, TypeVar

from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.ledger.rpc.events import encode_event
from pawl.job_store.ledger.rpc.messages import own_usage
from pawl.job_store.ledger.rules.events import Event
from pawl.job_store.ledger.rules.steps import ESTIMATE_SECONDS_MAX, Step
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.job_store.ledger.rules.usage import UsageKey, Used, added
from pawl.job_store.ledger.store import tables, usage
from pawl.job_store.ledger.store.columns import IS_HEAD, Columns, Statement, Write, joined

R = TypeVar("R")

# The statements are built only from constants in this package.
# ruff: noqa: S608

# The version of a row, xmin, is the id of the last transaction that wrote it. After a restart or failover of the server
# ids may repeat.
_VERSION: Final = "pg_current_xact_id()::xid AS version, pg_postmaster_start_time() AS server_start"

# The columns of a conversation that steps read, and those that they write. Others, such as those of the search index,
# may have changed.
_READ: Final = ("store_id", "conversation_id", "user_id", "active_run_id", "last_number", "title", "title_run_id")
_WRITTEN: Final = (
    "store_id",
    "conversation_id",
    "active_run_id",
    "last_number",
    "title_at",
    "title_run_id",
    "update_time",
)

_read, _written = attrgetter(*_READ), attrgetter(*_WRITTEN)

# Steps lock their rows in the expected versions before anything is written: conversations before runs, each in key
# order, as everywhere. A lock that had to wait checks the version again on the newest row.
_CONVERSATIONS: Final = Statement(
    f"""SELECT k.head FROM job_store.conversations AS t
    JOIN ({{rows}}) AS k (head, {", ".join(_READ)}) USING (store_id, conversation_id)
    WHERE t.user_id = k.user_id AND t.active_run_id = k.active_run_id AND t.last_number = k.last_number
    AND t.title = k.title AND t.title_run_id = k.title_run_id AND t.queue = '' AND t.background IS NULL
    ORDER BY store_id, conversation_id FOR UPDATE OF t""",
    ("integer", "text", "text", "text", "text", "bigint", "text", "text"),
    gathered=True,
    name="locked_conversations",
)
_RUNS: Final = Statement(
    """SELECT k.head, k.alone FROM job_store.runs AS t
    JOIN ({rows}) AS k (head, alone, store_id, run_id, epoch, last_seq, version, server_start) USING (store_id, run_id)
    WHERE (SELECT count(*) FROM locked_conversations) >= 0
    AND t.xmin = k.version AND t.epoch = k.epoch AND t.last_seq = k.last_seq
    AND k.server_start = pg_postmaster_start_time()
    ORDER BY store_id, run_id FOR UPDATE OF t""",
    ("integer", "boolean", "text", "text", "bigint", "bigint", "xid", "timestamptz"),
    gathered=True,
    name="locked_runs",
)
# Evaluated after all locks. Steps that have waited longer are left to a transaction: their time is outdated.
_HEADS: Final = Statement(
    f"""SELECT CASE WHEN clock_timestamp() < p.time + interval '{ESTIMATE_SECONDS_MAX} s' THEN numbers END AS numbers,
        clock_timestamp() AS now
    FROM (
        SELECT array_agg(head) AS numbers FROM locked_runs
        WHERE alone OR head IN (SELECT head FROM locked_conversations)
    ) AS h, ({{rows}}) AS p (time)""",
    ("timestamptz",),
    gathered=True,
    name="heads",
)
_CHANGED: Final = Statement(
    f"""UPDATE job_store.conversations AS t
    SET active_run_id = u.active_run_id, last_number = u.last_number,
        title_at = CASE WHEN t.title_run_id = u.title_run_id THEN t.title_at ELSE u.title_at END,
        title_run_id = u.title_run_id, update_time = greatest(t.update_time, u.update_time)
    FROM ({{rows}}) AS u (head, {", ".join(_WRITTEN)})
    WHERE t.store_id = u.store_id AND t.conversation_id = u.conversation_id AND {IS_HEAD}""",
    ("integer", "text", "text", "text", "bigint", "timestamptz", "text", "timestamptz"),
    gathered=False,
)
# Whether a run is waiting for a slot in one of the stores.
ANY_WAITS: Final = """EXISTS (
    SELECT FROM unnest({stores}::text[]) AS k (store_id) CROSS JOIN LATERAL (
        SELECT FROM job_store.runs AS r WHERE r.store_id = k.store_id AND r.claim_at <= now() AND NOT r.active LIMIT 1
    ) AS waiting
)"""
_FREED: Final = Statement(
    f"SELECT {ANY_WAITS.format(stores='ARRAY(SELECT k.store_id FROM ({rows}) AS k (store_id))')} AS any_waits",
    ("text",),
    gathered=True,
    name="freed",
)
_STEPS_WRITTEN: Final = f"""{_VERSION}, (SELECT now FROM heads) AS now, (SELECT numbers FROM heads) AS numbers,
(SELECT any_waits FROM freed) AS any_waits"""


class Changes:
    """The changes that a unit of work made, with its events packed.

    Without `keeps_lifecycle`, nothing is added to the outbox.
    """

    def __init__(self, unit: UnitOfWork, *, keeps_lifecycle: bool) -> None:
        self.unit = unit
        encoded = [(event, encode_event(event)) for event in unit.events.rows]
        self.events: Sequence[LogRow] = log_rows.pack(encoded)
        self.outbox: list[tuple[Event, bytes | None]] = []
        if keeps_lifecycle:
            self.outbox += [(event, None) for event in unit.events.rows if event.lifecycle_type]
            # The outbox stores the bytes of events that are in no log.
            self.outbox += [(event, encode_event(event)) for event in unit.off_log.rows]

    @property
    def counts(self) -> Sequence[tuple[UsageKey, Used]]:
        """Return what the changes add to the usage figures, in key order."""
        return added(self.unit, own_usage)


def of_group(changed: Changes) -> tuple[str, list[Any]] | None:
    """Return the statement that writes all changes of a group, or None if there are none."""
    unit = changed.unit
    # Sorted, so that two groups that create the same rows wait for each other instead of deadlocking.
    requests = sorted(unit.requests.created(), key=lambda row: row.key)
    # Sorted by client key first, because other groups may create conversations with the same keys.
    conversations = sorted(unit.conversations.created(), key=lambda row: (row.key_hash or b"", row.key))
    new_runs = unit.runs.created()
    writes = [
        *_created(tables.REQUESTS, requests),
        *_created(tables.CONVERSATIONS, conversations),
        *_changed(tables.CONVERSATIONS, unit.conversations.changed()),
        *_created(tables.SEGMENTS, unit.segments.rows),
        *_created(tables.RUNS, new_runs, None, [unit.loop_states.get(run.key) for run in new_runs]),
        *_created(tables.COMMANDS, unit.commands.created()),
        *_changed(tables.COMMANDS, unit.commands.changed()),
        *_changed(tables.SCHEDULES, unit.schedules.changed()),
        *_changed(tables.TRIGGERS, unit.triggers.changed()),
        *_created(tables.TRIGGER_EVENTS, unit.trigger_events.created()),
        *_changed(tables.TRIGGER_EVENTS, unit.trigger_events.changed()),
        *_created(tables.LANES, unit.lanes.created()),
        *_changed(tables.LANES, unit.lanes.changed()),
        *_writes([changed], None),
    ]
    return joined(writes, _VERSION) if writes else None


def of_steps(steps: Sequence[Step], changed: Sequence[Changes], now: datetime) -> tuple[str, list[Any]]:
    """Return a statement that writes the steps whose rows are unchanged, and returns the numbers of these steps.

    The other steps are not written.
    """
    conversations = [(step.number, before, after) for step in steps for before, after in step.conversations]
    writes = [
        _write(_CONVERSATIONS, [(number, *_read(before)) for number, before, _ in conversations]),
        _write(_RUNS, [_head(step) for step in steps]),
        _write(_HEADS, [(now,)]),
        _write(_FREED, sorted({(step.cached.run.store_id,) for step in steps if step.frees_slot})),
    ]
    if conversations:
        writes.append(_write(_CHANGED, [(number, *_written(after)) for number, _, after in conversations]))
    return joined([*writes, *_writes(changed, [step.number for step in steps])], _STEPS_WRITTEN)


def _head(step: Step) -> tuple[Any, ...]:
    run, (version, server_start) = step.cached.run, step.cached.version
    is_alone = not step.conversations
    return step.number, is_alone, run.store_id, run.run_id, run.epoch, run.last_seq, version, server_start


def _write(statement: Statement, rows: Sequence[Sequence[Any]]) -> Write:
    return Write(statement, list(zip(*rows, strict=True)) if rows else [()] * len(statement.types))


def _writes(parts: Sequence[Changes], heads: Sequence[int] | None) -> list[Write]:
    """Return the statements that write the rows changed by steps.

    With `heads`, a number for each part, only parts whose number is in the result of the statement `heads` are written.
    """
    units = [part.unit for part in parts]
    loop_states = {run: state for unit in units for run, state in unit.loop_states.items()}

    def flat(rows_of: Sequence[Sequence[R]]) -> tuple[list[R], list[int] | None]:
        rows = [row for each in rows_of for row in each]
        if heads is None:
            return rows, None
        return rows, [head for head, each in zip(heads, rows_of, strict=True) for _ in each]

    runs, run_heads = flat([unit.runs.changed() for unit in units])
    outbox, outbox_heads = flat([part.outbox for part in parts])
    counts, count_heads = flat([part.counts for part in parts])
    return [
        *_changed(tables.RUNS, runs, run_heads, [loop_states.get(run.key) for _, run in runs]),
        *_created(tables.MESSAGES, *flat([unit.messages.rows for unit in units])),
        *_created(tables.CALLS, *flat([unit.calls.created() for unit in units])),
        *_changed(tables.CALLS, *flat([unit.calls.changed() for unit in units])),
        *_created(tables.EVENTS, *flat([part.events for part in parts])),
        *_created(tables.OUTBOX, [event for event, _ in outbox], outbox_heads, [payload for _, payload in outbox]),
        *usage.additions(counts, count_heads),
    ]


def _created(
    columns: Columns[R], rows: Sequence[R], heads: Sequence[int] | None = None, beside: Sequence[Any] | None = None
) -> list[Write]:
    return [columns.insert(rows, beside, heads)] if rows else []


def _changed(
    columns: Columns[R],
    rows: Sequence[tuple[R, R]],
    heads: Sequence[int] | None = None,
    beside: Sequence[Any] | None = None,
) -> list[Write]:
    return [columns.update(rows, beside, heads)] if rows else []
