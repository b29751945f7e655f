"""In a database that is sharded by store, transactions change rows of one store only."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from pawl.job_store.ledger.store import leases
from pawl.job_store.ledger.store.journal import is_sharded
from pawl.server.db.database import Database
from tests.ledger.game import MOVES, game
from tests.ledger.model import LIMITS
from tests.ledger.stores import PASS_TIME, PostgresStore

_TABLES = ("conversations", "messages", "runs", "calls", "commands", "events", "requests", "outbox")
_RECORD = """
CREATE TABLE still.changes (transaction xid8, store_id text, statement text);
CREATE FUNCTION still.record() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO still.changes VALUES (pg_current_xact_id(), coalesce(NEW.store_id, OLD.store_id), current_query());
    RETURN NULL;
END $$;
"""
_WIDE = """
SELECT DISTINCT statement FROM still.changes WHERE transaction IN (
    SELECT transaction FROM still.changes GROUP BY transaction HAVING count(DISTINCT store_id) > 1
)
"""
# A worker renews and releases its leases in all stores with one statement, which needs no lock across shards.
_OF_A_WORKER = (leases._RENEW, leases._RELEASE)
_SUBMITTED = 12
_STEPS = 40


async def test_the_database_says_that_it_is_sharded(frozen_url: str) -> None:
    name = frozen_url.partition("?")[0].rpartition("/")[2]
    for value, expected in (("", False), ("on", True), ("off", False)):
        async with Database(frozen_url, application_name="test") as database:
            await database.execute(f"ALTER DATABASE {name} SET pawl.sharded_by_store = '{value}'")
        async with Database(frozen_url, application_name="test") as database:
            assert await is_sharded(database) is expected


@pytest.mark.parametrize("one_store", [True, False])
async def test_each_transaction_changes_only_one_store(databases: Sequence[Database], one_store: bool) -> None:
    store = PostgresStore(databases[0], LIMITS[0], one_store=one_store)
    await store.wipe()
    async with databases[0].acquire() as connection:
        await connection.execute(_RECORD)
        for table in _TABLES:
            await connection.execute(
                f"CREATE TRIGGER record AFTER INSERT OR UPDATE OR DELETE ON job_store.{table}"
                " FOR EACH ROW EXECUTE FUNCTION still.record()"
            )
        chance = Random(1)
        async with game([store], chance.choice) as played:
            for _ in range(_SUBMITTED):
                await played.play(played.choose.submit())
            for _ in range(_STEPS):
                await chance.choice(MOVES)(played)
        wide = {row["statement"] for row in await connection.fetch(_WIDE)} - {PASS_TIME, *_OF_A_WORKER}
        assert await connection.fetchval("SELECT count(DISTINCT store_id) FROM still.changes") > 1
    assert (wide == set()) == one_store
