"""Loading of triggers, of the events that operations name, and of what these wait for."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any, Final

import msgspec

from pawl.chassis.db.database import Connection
from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.job_store.ledger.store import tables
from pawl.job_store.triggers.rules import EventKey, LaneKey, TriggerKey

# The statements are made from constants of this package only.
# ruff: noqa: S608

# Lanes and events belong to triggers: nobody changes them without this lock. A key that is not there any more has
# ended, too.
_TRIGGERS: Final = f"""
SELECT {tables.TRIGGERS.names}, starts_with(credential_id, 'key_') AND NOT EXISTS (
    SELECT FROM job_store.api_keys AS a
    WHERE a.key_id = t.credential_id AND a.revoke_time IS NULL AND (a.expire_time IS NULL OR a.expire_time > now())
) AS credential_ended
FROM job_store.triggers AS t
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id) AS k USING (store_id, trigger_id)
ORDER BY store_id, trigger_id
FOR UPDATE OF t
"""
_LANES: Final = f"""
SELECT {tables.LANES.names} FROM job_store.trigger_lanes
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id, unnest($3::text[]) AS lane) AS k
USING (store_id, trigger_id, lane)
"""
_EVENTS: Final = f"""
SELECT {tables.TRIGGER_EVENTS.names} FROM job_store.trigger_events
JOIN (SELECT unnest($1::text[]) AS store_id, unnest($2::text[]) AS trigger_id, unnest($3::text[]) AS event_id) AS k
USING (store_id, trigger_id, event_id)
"""


async def load(
    connection: Connection,
    unit: UnitOfWork,
    triggers: Collection[TriggerKey],
    lanes: Collection[LaneKey],
    events: Collection[EventKey],
) -> RowKeys:
    """Load them, locked until the end of the transaction; return the runs that they need."""
    records = await connection.fetch(_TRIGGERS, *_columns(TriggerKey, triggers))
    tables.load_into(unit.triggers, tables.TRIGGERS, records)
    records = await connection.fetch(_LANES, *_columns(LaneKey, lanes)) if lanes else []
    waiting = [lane.waiting for lane in tables.load_into(unit.lanes, tables.LANES, records) if lane.event_id]
    records = await connection.fetch(_EVENTS, *_columns(EventKey, dict.fromkeys([*events, *waiting])))
    tables.load_into(unit.trigger_events, tables.TRIGGER_EVENTS, records)
    last = [RunKey(row.store_id, row.last_run_id) for _, row in unit.triggers.items() if row.last_run_id]
    before = tuple(RunKey(row.store_id, row.last_run_id) for _, row in unit.lanes.items() if row.last_run_id)
    runs = tuple(dict.fromkeys((*last, *before)))
    # Those of lanes may be stopped.
    return RowKeys(runs=runs, ends=before, calls_of=before, commands_of=before)


def _columns(kind: type[msgspec.Struct], keys: Collection[Any]) -> list[list[Any]]:
    return [list(map(attrgetter(name), keys)) for name in kind.__struct_fields__]
