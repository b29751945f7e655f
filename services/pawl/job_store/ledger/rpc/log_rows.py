"""Packs events into log rows, and unpacks them.

One row holds the events that a transaction wrote for a run. Only large events are split into several rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from pawl.chassis.ids import RunKey
from pawl.chassis.rpc.parts import in_parts
from pawl.job.v1.ledger_pb2 import EncodedEvents
from pawl.job_store.ledger.ports import LogRow
from pawl.job_store.ledger.rules.events import Event

# NATS accepts messages of 1 MiB by default. A larger event gets its own row.
ROW_BYTES_MAX: Final = 256 * 1024


def pack(events: Iterable[tuple[Event, bytes]]) -> list[LogRow]:
    """Pack events and their bytes into log rows. The events of each run must be in order of seq."""
    logs: dict[RunKey, list[tuple[int, bytes]]] = {}
    for event, encoded in events:
        logs.setdefault(RunKey(event.store_id, event.run_id), []).append((event.seq, encoded))
    return [
        LogRow(
            store_id=run.store_id,
            run_id=run.run_id,
            last_seq=part[-1][0],
            first_seq=part[0][0],
            events=EncodedEvents(events=[encoded for _, encoded in part]).SerializeToString(),
        )
        for run, log in logs.items()
        for part in in_parts(log, lambda entry: len(entry[1]), size_max=ROW_BYTES_MAX)
    ]


def unpack(events: bytes) -> Sequence[bytes]:
    return EncodedEvents.FromString(events).events


def cut(rows: Iterable[tuple[int, bytes]], after_seq: int, events_max: int) -> list[bytes]:
    """Return at most `events_max` events that follow `after_seq`. The rows are given as (`first_seq`, `events`)."""
    found: list[bytes] = []
    for first_seq, events in rows:
        found += unpack(events)[max(0, after_seq + 1 - first_seq) :]
    return found[:events_max]
