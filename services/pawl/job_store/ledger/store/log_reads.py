"""Reads the events in the log of a run. A gap replaces removed events."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import RunKey, UserId
from pawl.errors import RunNotFound
from pawl.job_store.ledger.reading import LogGap, LogPart
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.ledger.store import tables
from pawl.server.db.database import Connection
from pawl.values import RunState

# The statements are built only from constants in this package.
# ruff: noqa: S608

# A part of a log that has reached this size accepts no more rows.
EVENTS_BYTES_MAX: Final = 1024 * 1024
# A snapshot includes no more messages or calls beyond this size.
SNAPSHOT_BYTES_MAX: Final = 512 * 1024
# Larger results are not read for a snapshot.
RESULT_BYTES_MAX: Final = 17 * 1024

_SEQ_MAX: Final = 2**63 - 1

# A single statement reads from one snapshot, so no event that the run row counts is missing. For another user's run it
# reads no more than for a missing one, so that the response time does not reveal that the run exists.
_EVENTS: Final = """
SELECT r.state, r.last_seq, r.trimmed_seq, r.trimmed_log_seq, e.first_seq, e.events
FROM job_store.runs AS r CROSS JOIN LATERAL (SELECT greatest($3, r.trimmed_seq, r.trimmed_log_seq) AS seq) AS start
LEFT JOIN LATERAL (
    SELECT first_seq, events FROM (
        SELECT first_seq, events, sum(length(events)) OVER (ORDER BY last_seq) - length(events) AS bytes_before
        FROM job_store.events WHERE store_id = $1 AND run_id = $2 AND last_seq > start.seq
        ORDER BY last_seq LIMIT $4
    ) AS part WHERE bytes_before < $5 AND first_seq - $4 <= start.seq
) AS e ON true
WHERE r.store_id = $1 AND r.run_id = $2 AND ($6 = '' OR r.user_id = $6) ORDER BY e.first_seq
"""
_RUN: Final = f"SELECT {tables.RUNS.names} FROM job_store.runs WHERE store_id = $1 AND run_id = $2"
_MESSAGES: Final = f"""
SELECT {tables.MESSAGES.names}, found FROM (
    SELECT *, count(*) OVER () AS found,
           sum(length(body)) OVER (ORDER BY number DESC) - length(body) AS bytes_before
    FROM job_store.messages
    WHERE store_id = $1 AND run_id = $2 AND conversation_id = (
        SELECT conversation_id FROM job_store.runs WHERE store_id = $1 AND run_id = $2
    )
) AS m WHERE bytes_before < $3 ORDER BY number
"""
_CALLS: Final = f"""
SELECT {tables.CALLS.names.replace(" result,", " CASE WHEN result_bytes <= $4 THEN result END AS result,")},
       CASE WHEN result_bytes > $4 THEN result_bytes ELSE 0 END AS omitted_bytes, found
FROM (
    SELECT *, count(*) OVER () AS found, sum(bytes) OVER (ORDER BY round DESC, batch_index DESC, call_id DESC) - bytes
        AS bytes_before
    FROM (
        SELECT *, length(result) AS result_bytes,
               length(spec) + length(arguments) + CASE WHEN length(result) <= $4 THEN length(result) ELSE 0 END AS bytes
        FROM job_store.calls WHERE store_id = $1 AND run_id = $2
    ) AS sized
) AS c WHERE bytes_before < $3 ORDER BY round, batch_index, call_id
"""


async def read(connection: Connection, key: RunKey, user_id: UserId, *, after_seq: int, events_max: int) -> LogPart:
    start = min(after_seq, _SEQ_MAX)
    records = await connection.fetch(_EVENTS, key.store_id, key.run_id, start, events_max, EVENTS_BYTES_MAX, user_id)
    if not records:
        raise RunNotFound
    run = records[0]
    gap = None
    end = max(run["trimmed_seq"], run["trimmed_log_seq"])
    if start < end:
        gap = await _gap(connection, key, start + 1, end, with_calls=end == run["trimmed_seq"])
    rows = [(record["first_seq"], record["events"]) for record in records if record["events"] is not None]
    return LogPart(
        payloads=log_rows.cut(rows, max(start, end), events_max),
        last_seq=run["last_seq"],
        ended=RunState(run["state"]).is_terminal,
        gap=gap,
    )


async def _gap(connection: Connection, key: RunKey, from_seq: int, to_seq: int, *, with_calls: bool) -> LogGap:
    """Return a gap with its run.

    An ended run may be removed concurrently, so the run is read last.

    For an open job with a trimmed log, the gap has no calls. The calls of the removed events were removed too, and the
    following events report all other calls.
    """
    shown = (key.store_id, key.run_id, SNAPSHOT_BYTES_MAX)
    messages = await connection.fetch(_MESSAGES, *shown)
    calls = await connection.fetch(_CALLS, *shown, RESULT_BYTES_MAX) if with_calls else []
    record = await connection.fetchrow(_RUN, key.store_id, key.run_id)
    if record is None:
        raise RunNotFound
    run = tables.RUNS.read(record)
    return LogGap(
        from_seq=from_seq,
        to_seq=to_seq,
        run=run,
        messages=[tables.MESSAGES.read(record) for record in messages],
        calls=[tables.CALLS.read(record) for record in calls],
        omitted_bytes={record["call_id"]: record["omitted_bytes"] for record in calls},
        omitted_messages=messages[0]["found"] - len(messages) if messages else 0,
        omitted_calls=run.trimmed_rounds + (calls[0]["found"] - len(calls) if calls else 0),
    )
