"""Life-cycle events in PostgreSQL: events to be sent to JetStream, and events already sent.

The stream acknowledges events before it syncs them, and an operator may wipe it. Sent events are therefore stored for a
while, with their sequence number in the stream. If the stream was recreated, or ends before that number, the event is
lost. It then returns to the outbox and is sent again under the same id.

Automatic pauses of schedules and triggers are recorded in their rows. Their events, whose ids are derived from the
pause, are sent again until they are acknowledged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from asyncpg import Record

from pawl.chassis.ids import RunId, RunKey
from pawl.chassis.process import logs
from pawl.event.v1 import event_pb2
from pawl.job_store.ledger.ports import Lifecycle, StreamEnd
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.lifecycle.stream import JetStreamLifecycle
from pawl.server.db.database import Connection, Database, affected

# Changes lost in a crash are repeated under the same id, so commits need not wait for the disk. A recall is not
# repeated, so it waits.
_RELAY_LOCK: Final = """
SELECT pg_try_advisory_xact_lock(hashtext('job_store.outbox'))
    AND ($1 OR set_config('synchronous_commit', 'off', true) = 'off')
"""
_WAIT_FOR_RELAY: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.outbox'))"
# A row of the log is returned only with the first of its events.
_OUTBOX: Final = """
SELECT o.id, o.store_id, o.run_id, o.seq, o.event_id, o.type, o.time, o.payload, e.first_seq,
    (SELECT trace FROM job_store.runs AS r WHERE r.store_id = o.store_id AND r.run_id = o.run_id) AS trace, CASE
    WHEN e.last_seq IS DISTINCT FROM lag(e.last_seq) OVER (PARTITION BY o.store_id, o.run_id ORDER BY o.id)
    THEN e.events END AS events
FROM (SELECT * FROM job_store.outbox ORDER BY id LIMIT $1) AS o LEFT JOIN LATERAL (
    SELECT first_seq, last_seq, events FROM job_store.events AS e
    WHERE e.store_id = o.store_id AND e.run_id = o.run_id AND e.last_seq >= o.seq AND o.payload IS NULL
    ORDER BY e.last_seq LIMIT 1
) AS e ON e.first_seq <= o.seq
ORDER BY o.id
"""
_GONE: Final = "DELETE FROM job_store.outbox WHERE id = ANY ($1::bigint[])"
_SENT: Final = """
WITH stored AS (
    DELETE FROM job_store.outbox AS o USING unnest($1::bigint[], $2::bigint[]) AS k (id, stream_seq)
    WHERE o.id = k.id RETURNING o.*, k.stream_seq
)
INSERT INTO job_store.sent (id, store_id, run_id, seq, event_id, type, "time", payload, stream_create_time, stream_seq)
SELECT id, store_id, run_id, seq, event_id, type, "time", payload, $3, stream_seq FROM stored
"""
_RECALL: Final = """
WITH lost AS (
    DELETE FROM job_store.sent WHERE id IN (
        SELECT id FROM job_store.sent WHERE stream_create_time <> $1 OR stream_seq > $2 ORDER BY id LIMIT $3
    ) RETURNING *
)
INSERT INTO job_store.outbox (id, store_id, run_id, seq, event_id, type, "time", payload) OVERRIDING SYSTEM VALUE
SELECT id, store_id, run_id, seq, event_id, type, "time", payload FROM lost
"""
_RECALLED_ROWS: Final = 10_000
_PAUSES: Final = " UNION ALL ".join(
    f"""
(SELECT '{name}' AS name_of, store_id, {name}_id AS id, user_id, name, pause_note, pause_time
 FROM job_store.{name}s WHERE self_paused AND told_time IS DISTINCT FROM pause_time ORDER BY pause_time LIMIT $1)
"""
    for name in ("schedule", "trigger")
)
_PAUSE_SENT: Final = {
    name: f"""
UPDATE job_store.{name}s AS s SET told_time = k.pause_time
FROM unnest($1::text[], $2::text[], $3::timestamptz[]) AS k (store_id, id, pause_time)
WHERE s.store_id = k.store_id AND s.{name}_id = k.id
"""
    for name in ("schedule", "trigger")
}

# The statements are built only from constants in this module.
# ruff: noqa: S608

_log = logs.get_logger(__name__)


class PostgresOutbox:
    """Life-cycle events that the stream does not have yet, or that it has lost.

    An advisory lock lets only one replica relay events at a time, which preserves their order.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._recalled_poll_number = 0

    async def relay(self, stream: JetStreamLifecycle, *, events_max: int) -> int:
        """Send the oldest events and mark those that the stream has stored.

        Return how many were removed from the outbox. Return 0 while another replica is relaying or the stream is
        unavailable. No event is lost.
        """
        end = await stream.end()
        if end is None:
            return 0
        recalls = end.poll_number != self._recalled_poll_number
        async with self._database.transaction() as connection:
            if not await connection.fetchval(_RELAY_LOCK, recalls):
                return 0
            if recalls:
                await _recall(connection, end)
            records = await connection.fetch(_OUTBOX, events_max)
            payloads = _payloads(records)
            # For events whose run has since been removed, there is nothing to send.
            gone = [record["id"] for record in records if record["id"] not in payloads]
            present = (record for record in records if record["id"] in payloads)
            stored = await stream.send([_lifecycle(record, payloads[record["id"]]) for record in present])
            if gone:
                await connection.execute(_GONE, gone)
            if stored:
                await connection.execute(_SENT, list(stored), list(stored.values()), end.create_time)
        self._recalled_poll_number = end.poll_number
        return len(gone) + len(stored)

    async def relay_pauses(self, stream: JetStreamLifecycle, *, pauses_max: int) -> None:
        """Send the events of automatic pauses, and mark those that the stream has stored.

        If another replica does this too, the stream drops the repeated events.
        """
        pauses = dict(enumerate(await self._database.fetch(_PAUSES, pauses_max)))
        if not pauses:
            return
        stored = await stream.send([_pause(number, record) for number, record in pauses.items()])
        for name, statement in _PAUSE_SENT.items():
            sent = [pauses[number] for number in stored if pauses[number]["name_of"] == name]
            await self._database.execute(statement, *_columns(sent, ("store_id", "id", "pause_time")))


async def keep_relay_out(connection: Connection) -> None:
    """Block the relay until the transaction ends, so that it does not send events that the transaction removes."""
    await connection.execute(_WAIT_FOR_RELAY)


async def _recall(connection: Connection, end: StreamEnd) -> None:
    recalled = 0
    while True:
        count = affected(await connection.execute(_RECALL, end.create_time, end.last_seq, _RECALLED_ROWS))
        recalled += count
        if count < _RECALLED_ROWS:
            break
    if recalled:
        _log.warning("lifecycle.lost_by_stream", events=recalled)


def _columns(records: Iterable[Record], names: Iterable[str]) -> list[list[object]]:
    return [[record[name] for record in records] for name in names]


def _pause(number: int, record: Record) -> Lifecycle:
    time = record["pause_time"]
    digest = hashlib.sha256(f"{record['store_id']} {record['id']} {time.isoformat()}".encode()).hexdigest()
    event = event_pb2.RunEvent(
        store_id=record["store_id"],
        event_id=f"evt_{digest[:32]}",
        type=f"{record['name_of']}.paused",
        starter_paused=event_pb2.StarterPaused(
            name=record["name"], user_id=record["user_id"], note=record["pause_note"]
        ),
    )
    event.time.FromDatetime(time)
    return Lifecycle(
        outbox_id=number,
        store_id=record["store_id"],
        run_id=RunId(""),
        event_id=event.event_id,
        type=event.type,
        time=time,
        payload=event.SerializeToString(),
    )


def _payloads(records: Iterable[Record]) -> dict[int, bytes]:
    """Return the bytes of the events that still exist, by outbox id."""
    payloads: dict[int, bytes] = {}
    logs: dict[RunKey, Sequence[bytes]] = {}
    for record in records:
        run = RunKey(record["store_id"], record["run_id"])
        if record["events"] is not None:
            logs[run] = log_rows.unpack(record["events"])
        if record["payload"] is not None:
            payloads[record["id"]] = record["payload"]
        elif record["first_seq"] is not None:
            payloads[record["id"]] = logs[run][record["seq"] - record["first_seq"]]
    return payloads


def _lifecycle(record: Record, payload: bytes) -> Lifecycle:
    return Lifecycle(
        outbox_id=record["id"],
        store_id=record["store_id"],
        run_id=record["run_id"],
        event_id=record["event_id"],
        type=record["type"],
        time=record["time"],
        payload=payload,
        trace=record["trace"] or "",
    )
