"""Locks on resource keys, stored as rows in PostgreSQL, so that holding a lock does not occupy a connection."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Final

import asyncpg

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import shield
from pawl.server.db.database import Database
from pawl.tool_registry.execution.execution import LeaseWatch


def has_lease(instance: str, unrenewed: str, ends: str) -> str:
    """Return an SQL condition that is true while an instance is alive.

    The condition is also true if a lease has expired only according to the database clock (see `LeaseWatch`).
    `unrenewed` and `ends` are the SQL parameters for the two results of `LeaseWatch.unrenewed`.
    """
    return f"""EXISTS (
    SELECT FROM tool_registry.instances i WHERE i.instance_id = {instance} AND (
        i.expires_at > clock_timestamp() OR (i.instance_id, i.expires_at) NOT IN (
            SELECT u.holder, u.ended FROM unnest({unrenewed}::text[], {ends}::timestamptz[]) AS u (holder, ended))))"""  # noqa: S608  # constants only


_POLL_SECONDS: Final = (0.02, 0.05, 0.1, 0.2)
_RELEASE_RETRY_SECONDS: Final = 1.0

# Takes all keys or none, in a fixed order, so that two processes waiting for the same keys do not deadlock.
_ACQUIRE: Final = f"""
WITH taken AS (
    INSERT INTO tool_registry.resource_locks AS l (store_id, resource_key, holder, instance_id)
    SELECT $1, key, $3, $4 FROM unnest($2::text[]) WITH ORDINALITY AS wanted (key, position) ORDER BY position
    ON CONFLICT (store_id, resource_key) DO UPDATE SET holder = excluded.holder, instance_id = excluded.instance_id
    WHERE l.instance_id = $4 OR NOT {has_lease("l.instance_id", "$5", "$6")}
    RETURNING true)
SELECT count(*) FROM taken
"""  # noqa: S608  # constants only
# Waits for the end of a transaction that is about to insert the same rows.
_AWAIT: Final = """
INSERT INTO tool_registry.resource_locks AS l (store_id, resource_key, holder, instance_id)
SELECT $1, key, $3, $4 FROM unnest($2::text[]) WITH ORDINALITY AS wanted (key, position) ORDER BY position
ON CONFLICT (store_id, resource_key) DO UPDATE SET holder = l.holder
"""
_RELEASE: Final = """
DELETE FROM tool_registry.resource_locks
WHERE store_id = $1 AND resource_key = ANY ($2) AND holder = $3 AND instance_id = $4
"""

_log = logs.get_logger(__name__)


class _Busy(Exception):
    """Raised when another process holds one of the keys."""


class PostgresResourceLocks:
    """Allows one execution at a time for each resource key of a store, across all replicas.

    A lock lasts no longer than its process's lease.

    Callers in the same process form a queue for each key, so that at most one of them polls the database. If several
    processes are waiting, the first one to poll after a release gets the lock.
    """

    def __init__(self, database: Database, *, instance_id: str, watch: LeaseWatch) -> None:
        self._database = database
        self._instance_id = instance_id
        self._watch = watch
        self._turns: dict[tuple[str, str], _Turn] = {}
        self._numbers = itertools.count()

    @asynccontextmanager
    async def hold(self, store_id: StoreId, keys: Sequence[str], holder: str) -> AsyncIterator[None]:
        """Wait for all keys (sorted, without duplicates), and hold them inside the context.

        Waiting is safe to cancel, but not fair between processes. If the process loses its lease, it also loses the
        locks.
        """
        # Unique, because the same call may be executed again while its earlier locks are still being released.
        holder, is_acquired = f"{holder}/{next(self._numbers)}", False
        async with AsyncExitStack() as stack:
            for key in keys:
                await stack.enter_async_context(self._turn(store_id, key))
            try:
                await self._acquire(store_id, keys, holder)
                is_acquired = True
                yield
            finally:
                # Release even after an interrupted acquisition, which may still succeed. The release is shielded from
                # cancellation, because a row left behind would block all callers until this process ends.
                await shield(self._release(store_id, keys, holder, is_acquired=is_acquired))

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

    async def _acquire(self, store_id: StoreId, keys: Sequence[str], holder: str) -> None:
        tries = 0
        while True:
            try:
                async with self._database.transaction() as connection:
                    acquired = await connection.fetchval(
                        _ACQUIRE, store_id, list(keys), holder, self._instance_id, *self._watch.unrenewed()
                    )
                    if acquired != len(keys):
                        raise _Busy  # Rolls back the keys acquired so far.
            except (_Busy, asyncpg.DeadlockDetectedError):
                pause = _POLL_SECONDS[min(tries, len(_POLL_SECONDS) - 1)]
                tries += 1
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))  # noqa: S311  # spreads replicas
            else:
                return

    async def _release(self, store_id: StoreId, keys: Sequence[str], holder: str, *, is_acquired: bool) -> None:
        arguments = store_id, list(keys), holder, self._instance_id
        while True:
            try:
                async with nullcontext(self._database) if is_acquired else self._database.transaction() as connection:
                    if not is_acquired:
                        await connection.execute(_AWAIT, *arguments)
                    await connection.execute(_RELEASE, *arguments)
            except Exception as error:  # noqa: BLE001  # a row left behind blocks all callers
                _log.warning("resource_lock.release_delayed", error=type(error).__name__)
                await asyncio.sleep(_RELEASE_RETRY_SECONDS)
            else:
                return


class _Turn:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
