"""Resource keys as rows in PostgreSQL: held without holding a connection."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Final

import asyncpg

from pawl.chassis.db.database import Database
from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import shield
from pawl.tool_registry.execution.execution import LeaseWatch


def lives(instance: str, unrenewed: str, ends: str) -> str:
    """Return a condition: the process has a lease, or one that only the clock of the database says has ended.

    `unrenewed` and `ends` are the parameters for what `LeaseWatch.unrenewed` returns.
    """
    return f"""EXISTS (
    SELECT FROM tool_registry.instances i WHERE i.instance_id = {instance} AND (
        i.expires_at > clock_timestamp() OR (i.instance_id, i.expires_at) NOT IN (
            SELECT u.holder, u.ended FROM unnest({unrenewed}::text[], {ends}::timestamptz[]) AS u (holder, ended))))"""  # noqa: S608  # constants only


_POLL_SECONDS: Final = (0.02, 0.05, 0.1, 0.2)
_RELEASE_RETRY_SECONDS: Final = 1.0

# All or nothing, in order, so that two processes that want the same keys do not wait for each other in a circle.
_TAKE: Final = f"""
WITH taken AS (
    INSERT INTO tool_registry.resource_locks AS l (store_id, resource_key, holder, instance_id)
    SELECT $1, key, $3, $4 FROM unnest($2::text[]) WITH ORDINALITY AS wanted (key, position) ORDER BY position
    ON CONFLICT (store_id, resource_key) DO UPDATE SET holder = excluded.holder, instance_id = excluded.instance_id
    WHERE l.instance_id = $4 OR NOT {lives("l.instance_id", "$5", "$6")}
    RETURNING true)
SELECT count(*) FROM taken
"""  # noqa: S608  # constants only
# Whoever wants the same rows waits for the end of a transaction that is about to take them.
_AWAIT: Final = """
INSERT INTO tool_registry.resource_locks AS l (store_id, resource_key, holder, instance_id)
SELECT $1, key, $3, $4 FROM unnest($2::text[]) WITH ORDINALITY AS wanted (key, position) ORDER BY position
ON CONFLICT (store_id, resource_key) DO UPDATE SET holder = l.holder
"""
_GIVE_BACK: Final = """
DELETE FROM tool_registry.resource_locks
WHERE store_id = $1 AND resource_key = ANY ($2) AND holder = $3 AND instance_id = $4
"""

_log = logs.get_logger(__name__)


class _Busy(Exception):
    """Somebody else has one of the keys."""


class PostgresResourceLocks:
    """At most one execution at a time for each resource key of a store, over all replicas.

    A lock lasts while the lease of its process does.

    Within a process callers wait in turn, so that for each key at most one of
    them asks the database. Between processes the first that asks gets it.
    """

    def __init__(self, database: Database, *, instance_id: str, watch: LeaseWatch) -> None:
        self._database = database
        self._instance_id = instance_id
        self._watch = watch
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def hold(self, store_id: StoreId, keys: Sequence[str], holder: str) -> AsyncIterator[None]:
        """Wait for all keys (sorted, each once) and hold them inside the context.

        Safe to cancel. Not fair between processes. Held while the process lives.
        """
        # The same call may come again while what it held is being given back.
        holder, is_taken = f"{holder}/{next(self._numbers)}", False
        async with AsyncExitStack() as stack:
            for key in keys:
                await stack.enter_async_context(self._turn(store_id, key))
            try:
                await self._take(store_id, keys, holder)
                is_taken = True
                yield
            finally:
                # Also after an attempt to take them that was cut short, which may still succeed. Not to be
                # interrupted: a row left behind would keep everybody out until this process ends.
                await shield(self._give_back(store_id, keys, holder, is_taken=is_taken))

    @asynccontextmanager
    async def _turn(self, store_id: StoreId, key: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault((store_id, key), _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[store_id, key]

    async def _take(self, store_id: StoreId, keys: Sequence[str], holder: str) -> None:
        tries = 0
        while True:
            try:
                async with self._database.transaction() as connection:
                    taken = await connection.fetchval(
                        _TAKE, store_id, list(keys), holder, self._instance_id, *self._watch.unrenewed()
                    )
                    if taken != len(keys):
                        raise _Busy  # Rolls back what was taken.
            except (_Busy, asyncpg.DeadlockDetectedError):
                pause = _POLL_SECONDS[min(tries, len(_POLL_SECONDS) - 1)]
                tries += 1
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))  # noqa: S311  # spreads replicas
            else:
                return

    async def _give_back(self, store_id: StoreId, keys: Sequence[str], holder: str, *, is_taken: bool) -> None:
        arguments = store_id, list(keys), holder, self._instance_id
        while True:
            try:
                async with nullcontext(self._database) if is_taken else self._database.transaction() as connection:
                    if not is_taken:
                        await connection.execute(_AWAIT, *arguments)
                    await connection.execute(_GIVE_BACK, *arguments)
            except Exception as error:  # noqa: BLE001  # a row left behind keeps everybody out
                _log.warning("resource_lock.release_delayed", error=type(error).__name__)
                await asyncio.sleep(_RELEASE_RETRY_SECONDS)
            else:
                return


class _Turn:
    """The lock of a key in this process, and the number of its users."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
