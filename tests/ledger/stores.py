"""The simulated store and PostgreSQL behind one interface, with the helpers of the tests.

Both have a clock that moves only when a test moves it. In PostgreSQL, its time functions are shadowed by others of the
same name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import asyncpg
from msgspec.structs import replace

from pawl.chassis.ids import IdSource, RunKey
from pawl.job_store.ledger.cache import RunCache
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.ports import AttentionRepository, Journal, OfferRepository
from pawl.job_store.ledger.reading import Leases, Reads
from pawl.job_store.ledger.rpc import log_rows
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.ledger.rules.slots import SlotLimits, StoreSlots
from pawl.job_store.ledger.rules.usage import UsageKey, Used
from pawl.job_store.ledger.store import tables as columns
from pawl.job_store.ledger.store import usage
from pawl.job_store.ledger.store.columns import Columns
from pawl.job_store.ledger.store.journal import PostgresJournal
from pawl.job_store.ledger.store.leases import PostgresLeases
from pawl.job_store.ledger.store.reads import PostgresReads
from pawl.job_store.ledger.store.situations import PostgresAttentionRepository
from pawl.job_store.ledger.store.upkeep import PostgresOfferRepository
from pawl.server.db import database as postgres
from tests.fakes.manual_clock import ManualClock
from tests.simulation.conversations import MemoryAttentionRepository, MemoryOfferRepository
from tests.simulation.history import History
from tests.simulation.job_store import CachingReads, StepJournal, Unmetered
from tests.simulation.reads import MemoryLeases
from tests.simulation.store import PromptDatabase, Tables

# The statements are built from constants.
# ruff: noqa: S608

BEGIN = datetime(2026, 5, 1, tzinfo=UTC)

_FROZEN_CLOCK = f"""
CREATE SCHEMA still;
CREATE TABLE still.clock AS SELECT '{BEGIN.isoformat()}'::timestamptz AS time;
CREATE FUNCTION still.now() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT time FROM still.clock';
CREATE FUNCTION still.clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT time FROM still.clock';
DO $$ BEGIN EXECUTE 'ALTER DATABASE ' || current_database() || ' SET search_path = still, pg_catalog'; END $$;
"""

# PostgreSQL leaves the order of runs due at the same moment open: a microsecond orders them.
PASS_TIME = """
WITH tick AS (UPDATE still.clock SET time = time + $1)
UPDATE job_store.runs AS r SET claim_at = r.claim_at + (place - 1) * interval '1 microsecond'
FROM (
    SELECT store_id, run_id, row_number() OVER (PARTITION BY claim_at ORDER BY store_id, run_id) AS place
    FROM job_store.runs WHERE claim_at IS NOT NULL
) AS t
WHERE t.place > 1 AND (r.store_id, r.run_id) = (t.store_id, t.run_id)
"""

_CONVERSATIONS = ("conversations", "conversation_words", "conversation_segments", "erased_items", "messages")
_TABLES = (*_CONVERSATIONS, "runs", "calls", "commands", "events", "requests", "outbox", "usage_hours")
_WIPE = f"""
DELETE FROM still.clock;
INSERT INTO still.clock VALUES ('{BEGIN.isoformat()}');
TRUNCATE {", ".join(f"job_store.{name}" for name in _TABLES)};
"""


class Store(ABC):
    journal: Journal
    leases: Leases
    reads: Reads
    offer_repository: OfferRepository
    attention_repository: AttentionRepository
    one_store = False

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        self.announced = Announcements()

    def open(self) -> GroupCommit:
        clock: dict[str, Callable[[], Any]] = {"monotonic": lambda: 0.0, "lifecycle_written": lambda: None}
        return GroupCommit(self.journal, self.announced, Unmetered(), **clock, one_store=self.one_store)

    @abstractmethod
    async def now(self) -> datetime: ...

    @abstractmethod
    async def pass_time(self, seconds: float) -> None:
        """Advance the clock. Runs due at the same moment are ordered by id."""

    @abstractmethod
    async def tables(self) -> Tables: ...


class Announcements:
    def __init__(self) -> None:
        self.said: list[Any] = []

    async def publish(self, events: Sequence[Any]) -> None:
        self.said += [("events", row.store_id, row.run_id, row.events) for row in events]

    async def wake(self, wakeups: Sequence[Any]) -> None:
        self.said += [("wakeup", wakeup.worker_id, wakeup.run) for wakeup in wakeups]

    async def work_ready(self) -> None:
        """Do nothing: this announcement is not checked."""

    async def inboxes_changed(self, inboxes: object) -> None:
        """Do nothing: this announcement is not checked."""

    async def conversations_changed(self, conversations: object) -> None:
        """Do nothing: this announcement is not checked."""


class _QuietHistory(History):
    def tell(self, line: str) -> None:
        return


class MemoryStore(Store):
    def __init__(self, limits: Mapping[str, int]) -> None:
        super().__init__(limits)
        self.history = _QuietHistory()
        self.time = BEGIN
        self.database = PromptDatabase(lambda: self.time, self.history)
        cache = RunCache(self.seconds)
        self.journal = StepJournal(self.database, IdSource(ManualClock()), cache)
        self.leases = MemoryLeases(self.database, _slots_of(limits), crashes_max=limits["crashes"])
        self.reads = CachingReads(self.database, cache)
        self.offer_repository = MemoryOfferRepository(self.database)
        self.attention_repository = MemoryAttentionRepository(self.database)

    def seconds(self) -> float:
        return (self.time - BEGIN).total_seconds()

    async def now(self) -> datetime:
        return self.time

    async def pass_time(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)
        runs = self.database.tables.runs
        together = defaultdict(list)
        for key in sorted(runs):
            together[runs[key].claim_at].append(key)
        for time, keys in together.items():
            for place, key in enumerate(keys[1:] if time else (), 1):
                runs[key] = replace(runs[key], claim_at=time and time + timedelta(microseconds=place))

    async def tables(self) -> Tables:
        return self.database.tables


class PostgresStore(Store):
    """PostgreSQL as used by one replica with its own pool. Call `stop_clock` before creating the first replica."""

    # Of all replicas: they share the clock.
    passed_seconds: ClassVar[list[float]] = [0.0]

    def __init__(self, database: postgres.Database, limits: Mapping[str, int], *, one_store: bool = False) -> None:
        super().__init__(limits)
        self.one_store = one_store
        self.database = database
        self.cache = RunCache(lambda: self.passed_seconds[0])
        self.journal = PostgresJournal(database, IdSource(ManualClock()), self.cache)
        crashes_max = limits["crashes"]
        self.leases = PostgresLeases(
            database, StoreSlots(_slots_of(limits)), crashes_max=crashes_max, one_store=one_store
        )
        self.reads = PostgresReads(database, self.cache)
        self.offer_repository = PostgresOfferRepository(database)
        self.attention_repository = PostgresAttentionRepository(database)

    async def now(self) -> datetime:
        async with self.database.acquire() as connection:
            time: datetime = await connection.fetchval("SELECT now()")
        return time

    async def pass_time(self, seconds: float) -> None:
        async with self.database.acquire() as connection:
            await connection.execute(PASS_TIME, timedelta(seconds=seconds))
        self.passed_seconds[0] += seconds

    async def wipe(self) -> None:
        async with self.database.acquire() as connection:
            await connection.execute(_WIPE)

    async def tables(self) -> Tables:
        async with self.database.acquire() as connection:

            async def rows(of: Columns[Any], order: str = "1") -> list[Any]:
                select = f"SELECT {of.names} FROM {of.table} ORDER BY {order}"
                return [of.read(record) for record in await connection.fetch(select)]

            found = Tables(
                requests={row.key: row for row in await rows(columns.REQUESTS)},
                conversations={row.key: row for row in await rows(columns.CONVERSATIONS)},
                runs={row.key: row for row in await rows(columns.RUNS)},
                calls={row.key: row for row in await rows(columns.CALLS)},
                commands={row.key: row for row in await rows(columns.COMMANDS)},
            )
            for message in await rows(columns.MESSAGES, "number"):
                key = ConversationKey(message.store_id, message.conversation_id)
                found.messages.setdefault(key, []).append(message)
            for record in await connection.fetch("SELECT * FROM job_store.events ORDER BY last_seq"):
                found.events.setdefault(_run_of(record), []).extend(log_rows.unpack(record["events"]))
            states = "SELECT store_id, run_id, loop_state FROM job_store.runs WHERE loop_state <> ''"
            found.loop_states |= {_run_of(record): record["loop_state"] for record in await connection.fetch(states)}
            for record in await connection.fetch("SELECT store_id, run_id, event_id, time FROM job_store.outbox"):
                found.outbox[record["store_id"], record["event_id"]] = (_run_of(record), record["time"])
            select = (
                f"SELECT {usage.KEY}, {usage.totals(usage.FIGURES)} FROM job_store.usage_hours GROUP BY {usage.KEY}"
            )
            for record in await connection.fetch(select):
                values = dict(record)
                used_by = UsageKey(**{name: values.pop(name) for name in UsageKey.__struct_fields__})
                found.usage[used_by] = Used(**values)
        return found


def _run_of(record: Any) -> RunKey:
    return RunKey(record["store_id"], record["run_id"])


async def stop_clock(url: str) -> None:
    """Freeze the clock of a database for all later connections."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_FROZEN_CLOCK)
    finally:
        await connection.close()


def _slots_of(limits: Mapping[str, int]) -> SlotLimits:
    return SlotLimits(per_store=limits["per_store"], per_user=limits["per_user"])
