"""Selects the due runs that fit within the limits of a claim.

A claim has two steps. First it finds the stores, without a lock. Then it locks these stores, reads the first runs of
each store, and counts the used slots. Other claims on the same stores wait until it commits. Only claims make runs
active, so the limits hold for any number of job stores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from asyncpg import Record

from pawl.chassis.ids import RunKey, StoreId, UserId, WorkerId
from pawl.job_store.ledger.rules.slots import DueRun, Line, StoreSlots, Turns, assign_slots
from pawl.server.db.database import Connection, Database

# The statements are built only from constants in this module.
# ruff: noqa: S608

# Stores with a due run that has a slot or can get one, in circular order, from the store whose turn it is. The
# recursion hops from store to store through the index runs_claimable, so a store with 100,000 waiting runs costs as
# much as one with a single run.
_STORES: Final = """
WITH RECURSIVE later AS (
    (SELECT store_id FROM job_store.runs
     WHERE claim_at <= now() AND store_id > $1 ORDER BY store_id LIMIT 1)
    UNION ALL
    SELECT (SELECT r.store_id FROM job_store.runs AS r
            WHERE r.claim_at <= now() AND r.store_id > s.store_id ORDER BY r.store_id LIMIT 1)
    FROM later AS s WHERE s.store_id IS NOT NULL
), earlier AS (
    (SELECT store_id FROM job_store.runs
     WHERE claim_at <= now() AND store_id <= $1 ORDER BY store_id LIMIT 1)
    UNION ALL
    SELECT (SELECT r.store_id FROM job_store.runs AS r
            WHERE r.claim_at <= now() AND r.store_id > s.store_id AND r.store_id <= $1 ORDER BY r.store_id LIMIT 1)
    FROM earlier AS s WHERE s.store_id IS NOT NULL
)
SELECT s.store_id
FROM (SELECT store_id FROM later UNION ALL SELECT store_id FROM earlier) AS s
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE NOT r.in_background) AS used,
        count(*) FILTER (WHERE r.in_background) AS used_background,
        coalesce(bool_or(r.claim_at <= now()), false) AS is_due
    FROM job_store.runs AS r WHERE r.store_id = s.store_id AND r.active
) AS slots
CROSS JOIN LATERAL (SELECT $5::jsonb -> s.store_id AS own OFFSET 0) AS limits
WHERE s.store_id IS NOT NULL AND (
    slots.used < coalesce((limits.own -> 0)::integer, $2)
    OR slots.is_due
    OR (slots.used_background < coalesce((limits.own -> 1)::integer, $4) AND EXISTS (
        SELECT FROM job_store.runs AS r
        WHERE r.store_id = s.store_id AND r.in_background AND NOT r.active AND r.claim_at <= now() OFFSET 0
    ))
)
LIMIT $3
"""

# Locked in one order and before any row, to avoid deadlocks. Without bitmap scans, the first due runs are read in the
# order of an index: a bitmap would contain all of a store's due runs.
_LOCK: Final = """
SELECT pg_advisory_xact_lock(hashtext('job_store.places'), key), set_config('enable_bitmapscan', 'off', true)
FROM (SELECT DISTINCT hashtext(store_id) AS key FROM unnest($1::text[]) AS k (store_id) ORDER BY key) AS keys
"""

_DUE_RUN: Final = """
r.store_id, r.run_id, r.user_id, r.active, r.in_background, r.claim_at,
r.crashes + (r.worker_id IS NOT NULL)::integer AS crashes
"""
# The used slots of some stores, by user, counted once per claim.
_USED_SLOTS: Final = """
used_slots AS MATERIALIZED (
    SELECT a.store_id, a.user_id, count(*) FILTER (WHERE NOT a.in_background) AS used,
        count(*) FILTER (WHERE a.in_background) AS used_background
    FROM job_store.runs AS a WHERE a.store_id = ANY ($1::text[]) AND a.active
    GROUP BY a.store_id, a.user_id
)
"""
_USED: Final = """
coalesce((SELECT sum(used) FROM used_slots AS a WHERE a.store_id = due.store_id), 0)::bigint AS used,
coalesce((SELECT sum(used_background) FROM used_slots AS a WHERE a.store_id = due.store_id), 0)::bigint
    AS used_background,
coalesce((SELECT used FROM used_slots AS a WHERE a.store_id = due.store_id AND a.user_id = due.user_id), 0)
    AS used_by_user
"""

# The background runs that the worker holds.
_HELD: Final = """
held AS MATERIALIZED (
    SELECT count(*) AS background_held FROM job_store.runs WHERE worker_id = $4 AND in_background
)
"""
_TAKES_BACKGROUND: Final = "(SELECT background_held < $5 FROM held)"

# Some stores' first due runs: those that have a slot, then the others. In both groups, runs that have crashed workers
# come last. Background runs are read separately, and only if the worker may take one: they must not hide other runs. A
# run that one more crash would quarantine is left out once its lease has expired.
_DUE: Final = f"""
WITH {_USED_SLOTS}, {_HELD}
SELECT due.*, {_USED}, (SELECT background_held FROM held)
FROM unnest($1::text[]) AS s (store_id)
CROSS JOIN LATERAL (
    (SELECT {_DUE_RUN} FROM job_store.runs AS r
     WHERE r.store_id = s.store_id AND r.active AND NOT r.in_background AND r.claim_at <= now()
     AND (r.worker_id IS NULL OR r.crashes + 1 < $3)
     ORDER BY r.crashes, r.claim_at LIMIT $2)
    UNION ALL
    (SELECT {_DUE_RUN} FROM job_store.runs AS r
     WHERE {_TAKES_BACKGROUND} AND r.store_id = s.store_id AND r.active AND r.in_background AND r.claim_at <= now()
     AND (r.worker_id IS NULL OR r.crashes + 1 < $3)
     ORDER BY r.crashes, r.claim_at LIMIT $2)
    UNION ALL
    (SELECT {_DUE_RUN} FROM job_store.runs AS r
     WHERE r.store_id = s.store_id AND NOT r.active AND NOT r.in_background AND r.claim_at <= now()
     ORDER BY r.claim_at LIMIT $2)
    UNION ALL
    (SELECT {_DUE_RUN} FROM job_store.runs AS r
     WHERE {_TAKES_BACKGROUND} AND r.store_id = s.store_id AND NOT r.active AND r.in_background AND r.claim_at <= now()
     ORDER BY r.claim_at LIMIT $2)
) AS due
ORDER BY due.active DESC, due.in_background, due.crashes, due.claim_at
"""

# For some stores, the oldest waiting run of each of the next users.
_HEADS: Final = f"""
WITH RECURSIVE {_USED_SLOTS},
users AS (
    SELECT k.store_id COLLATE "C" AS store_id, k.user_id COLLATE "C" AS user_id, 0 AS hops
    FROM unnest($1::text[], $2::text[]) AS k (store_id, user_id)
    UNION ALL
    SELECT u.store_id, (
        SELECT r.user_id FROM job_store.runs AS r
        WHERE r.store_id = u.store_id AND r.user_id > u.user_id AND r.claim_at <= now()
        AND NOT r.active AND NOT r.in_background
        ORDER BY r.user_id LIMIT 1
    ), u.hops + 1
    FROM users AS u WHERE u.user_id IS NOT NULL AND u.hops < $3
)
SELECT due.*, {_USED}
FROM users AS s CROSS JOIN LATERAL (
    SELECT {_DUE_RUN} FROM job_store.runs AS r
    WHERE r.store_id = s.store_id AND r.user_id = s.user_id AND r.claim_at <= now()
    AND NOT r.active AND NOT r.in_background
    ORDER BY r.claim_at LIMIT 1
) AS due
WHERE s.hops > 0 AND s.user_id IS NOT NULL
ORDER BY due.crashes, due.claim_at
"""

_HAS_LAST_CHANCE: Final = "SELECT EXISTS (SELECT FROM job_store.runs WHERE worker_id = $1 AND crashes >= $2)"

# At least this many runs of each store are read.
_WINDOW_MIN: Final = 8
# If these all belong to users at their limits, the runs of this many other users are read.
_USERS_MAX: Final = 16
_HOPS_MAX: Final = 1000
_CURSORS_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Runs that fit within the limits as long as the transaction is open.

    `turns` is the order of turns after these runs. `has_more` means that other stores, or more runs of these stores,
    may be due.
    """

    runs: Sequence[DueRun]
    turns: Turns
    has_more: bool


class DueRuns:
    """Selects due runs. A worker holds at most one run that is on its last chance."""

    def __init__(self, slots: StoreSlots, *, crashes_max: int) -> None:
        self._slots = slots
        self._crashes_max = crashes_max
        # Where the round-robin over a store's users continues if its oldest runs must wait.
        self._last_users: dict[StoreId, UserId] = {}

    async def next_stores(self, database: Database, *, turns: Turns, stores_max: int) -> list[StoreId]:
        """Return the next stores that may have runs to claim. This takes no lock."""
        default, overrides = self._slots.default, self._slots.overrides
        records = await database.fetch(
            _STORES,
            turns.after,
            default.per_store,
            stores_max,
            default.background_per_store,
            msgspec.json.encode(
                {store: (limits.per_store, limits.background_per_store) for store, limits in overrides.items()}
            ).decode(),
            urgent=True,
        )
        return [record["store_id"] for record in records]

    async def pick(
        self,
        connection: Connection,
        worker_id: WorkerId,
        stores: Sequence[StoreId],
        *,
        turns: Turns,
        stores_max: int,
        runs_max: int,
        background_runs_max: int,
    ) -> Picked:
        """Return the runs of these stores that the worker may claim.

        Other claims on these stores wait until the transaction ends.
        """
        await connection.execute(_LOCK, stores)
        weights = [self._slots.of(store).weight for store in stores]
        rounds = -(-runs_max // sum(weights))
        window = max(_WINDOW_MIN, min(runs_max, rounds * max(weights)))
        records = await connection.fetch(_DUE, stores, window, self._crashes_max, worker_id, background_runs_max)
        held, due = max((record["background_held"] for record in records), default=0), _by_store(stores, records)
        kinds = {
            store: Counter((record["active"], record["in_background"]) for record in due[store]) for store in stores
        }
        cut = [store for store in stores if kinds[store][False, False] == window]
        has_more = bool(cut) or any(
            window in (found[True, False], found[True, True])
            or (found[False, True] == window and self._has_background_slot(due[store]))
            for store, found in kinds.items()
        )
        last_chances_max = await self._last_chances_max(connection, worker_id, due)
        share = partial(
            assign_slots,
            turns=turns,
            runs_max=runs_max,
            last_chances_max=last_chances_max,
            background_max=max(0, background_runs_max - held),
        )
        assigned = share(self._lines(due))
        blocked = self._blocked(due, cut, assigned.runs) if len(assigned.runs) < runs_max else []
        if blocked:
            for store, heads in (await self._heads(connection, blocked)).items():
                due[store] += heads
            assigned = share(self._lines(due))
        has_more = has_more or len(stores) == stores_max
        return Picked(runs=assigned.runs, turns=assigned.turns, has_more=has_more)

    def _has_background_slot(self, records: Sequence[Record]) -> bool:
        slots = self._slots.of(records[0]["store_id"])
        return int(records[0]["used_background"]) < slots.background_per_store

    async def _last_chances_max(
        self, connection: Connection, worker_id: WorkerId, due: Mapping[StoreId, Sequence[Record]]
    ) -> int:
        if all(record["crashes"] + 1 < self._crashes_max for records in due.values() for record in records):
            return 0
        return 0 if await connection.fetchval(_HAS_LAST_CHANCE, worker_id, self._crashes_max - 1) else 1

    def _blocked(
        self, due: Mapping[StoreId, list[Record]], cut: Sequence[StoreId], picked: Sequence[DueRun]
    ) -> list[StoreId]:
        granted = Counter(run.key.store_id for run in picked if not (run.is_active or run.is_background))
        return [store for store in cut if due[store][0]["used"] + granted[store] < self._slots.of(store).per_store]

    async def _heads(self, connection: Connection, stores: Sequence[StoreId]) -> dict[StoreId, list[Record]]:
        # The quotient is the number of users that can be at their limits.
        quotients = [limits.per_store // limits.per_user for limits in map(self._slots.of, stores)]
        hops = _USERS_MAX + min(max(quotients), _HOPS_MAX)
        if len(self._last_users) > _CURSORS_MAX:
            self._last_users.clear()
        after = [self._last_users.pop(store, "") for store in stores]
        heads = _by_store(stores, await connection.fetch(_HEADS, stores, after, hops))
        for store, records in heads.items():
            if len(records) == hops:
                self._last_users[store] = max(record["user_id"] for record in records)
        return heads

    def _lines(self, due: Mapping[StoreId, Sequence[Record]]) -> list[Line]:
        """Return a `Line` for each store, with its due runs in the order of `due`."""
        return [
            Line(
                due=[
                    DueRun(
                        key=RunKey(record["store_id"], record["run_id"]),
                        user_id=record["user_id"],
                        is_active=record["active"],
                        is_background=record["in_background"],
                        at_last_chance=record["crashes"] + 1 >= self._crashes_max,
                    )
                    for record in {record["run_id"]: record for record in records}.values()
                ],
                limits=self._slots.of(store),
                used=records[0]["used"],
                used_background=records[0]["used_background"],
                used_by_user={record["user_id"]: record["used_by_user"] for record in records},
            )
            for store, records in due.items()
            if records
        ]


def _by_store(stores: Sequence[StoreId], records: Sequence[Record]) -> dict[StoreId, list[Record]]:
    """Return the records of each store, in the order of `stores`."""
    found: dict[StoreId, list[Record]] = {store: [] for store in stores}
    for record in records:
        found[record["store_id"]].append(record)
    return found
