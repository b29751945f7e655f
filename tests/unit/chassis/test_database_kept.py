"""Connections that stay at hand are given out as if the pool were asked each time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from pawl.chassis import database_kept
from pawl.chassis.database import Database
from pawl.chassis.database_kept import KeptConnections, Lent, is_lost
from pawl.launcher.ports import free_port
from tests.databases import forwarding
from tests.poll import PATIENCE_SECONDS, until

_MAX = 2


class World:
    """A pool of two, and the connections kept from it."""

    def __init__(self, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.pool = pool
        self.kept = KeptConnections(pool)

    async def take(self) -> Lent:
        connection = await self.kept.take(asyncio.get_running_loop().time() + PATIENCE_SECONDS)
        assert await connection.fetchval("SELECT 1") == 1
        return connection

    async def give(self, connection: Lent, *, generation: int | None = None, is_fit: bool = True) -> None:
        generation = self.kept.generation if generation is None else generation
        await self.kept.give(connection, generation=generation, is_fit=is_fit)

    @property
    def in_pool(self) -> int:
        """The number of connections that the pool has back."""
        return self.pool.get_idle_size()


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with asyncpg.create_pool(database_url, min_size=1, max_size=_MAX) as pool:
        world = World(pool)
        yield world
        await world.kept.close()


async def test_a_connection_stays_at_hand_unless_something_went_wrong_or_all_is_over(world: World) -> None:
    first = await world.take()
    await world.give(first)
    assert world.in_pool == 0
    assert await world.take() is first
    await world.give(first, is_fit=False)
    assert world.in_pool == 1
    at_hand, busy = await world.take(), await world.take()
    await world.give(at_hand)
    await world.kept.close()
    assert world.in_pool == 1
    await world.give(busy)
    assert world.in_pool == _MAX


async def test_whoever_waits_gets_what_comes_back(world: World) -> None:
    busy = [await world.take() for _ in range(_MAX)]
    waiting = [asyncio.ensure_future(world.take()) for _ in range(_MAX)]
    for connection in busy:
        await asyncio.sleep(0)
        await world.give(connection)
    for connection in await asyncio.gather(*waiting):
        await world.give(connection)


async def test_who_waits_for_too_long_is_told(world: World) -> None:
    busy = [await world.take() for _ in range(_MAX)]
    with pytest.raises(TimeoutError):
        await world.kept.take(asyncio.get_running_loop().time())
    for connection in busy:
        await world.give(connection)
    assert world.in_pool == 0


async def test_a_transaction_that_was_left_open_is_ended(world: World) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # asyncpg complains of it.
    connection = await world.take()
    await connection.execute("BEGIN")
    await world.give(connection)
    connection = await world.take()
    assert not connection.is_in_transaction()
    await world.give(connection)


async def test_expired_connections_are_given_out_no_more(world: World) -> None:
    generation = world.kept.generation
    at_hand, busy = await world.take(), await world.take()
    old = {at_hand.get_server_pid(), busy.get_server_pid()}
    await world.give(at_hand)
    await world.kept.expire()
    await world.give(busy, generation=generation)
    new = [await world.take() for _ in range(_MAX)]
    assert not old & {connection.get_server_pid() for connection in new}
    for connection in new:
        await world.give(connection)


async def test_a_connection_that_broke_at_hand_is_given_out_no_more(world: World) -> None:
    broken, other = await world.take(), await world.take()
    pid = broken.get_server_pid()
    await world.give(broken)
    await other.execute("SELECT pg_terminate_backend($1)", pid)
    await until(lambda: is_lost(broken))
    next_one = await world.take()
    assert next_one.get_server_pid() != pid
    await world.give(next_one)
    await world.give(other)


async def test_what_a_burst_has_opened_is_closed_once_it_was_unused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_kept, "UNUSED_SECONDS_MAX", 0.05)
    for connection in [await world.take() for _ in range(_MAX)]:
        await world.give(connection)

    async def is_one_left() -> bool:
        await world.give(await world.take())
        return world.pool.get_size() == 1

    await until(is_one_left)


@asynccontextmanager
async def _heard(database_url: str) -> AsyncIterator[tuple[Database, asyncio.Event]]:
    """A database of one connection whose server is heard only while the event is set; nothing in it fails unseen."""
    unseen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    speaks = asyncio.Event()
    speaks.set()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await speaks.wait()
            writer.write(data)
        writer.close()

    async with (
        forwarding(database_url, free_port(), say) as url,
        Database(url, application_name="test", connections_max=1) as database,
    ):
        yield database, speaks
        gc.collect()
        assert await database.fetchval("SELECT 1") == 1
    assert not unseen


async def test_a_cancellation_that_the_server_does_not_confirm_in_time_is_nobodys_failure(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session is given up, although its caller is cancelled again and sees no more of it."""
    monkeypatch.setattr("pawl.chassis.database_kept._RELEASE_TIMEOUT_SECONDS", 0.1)

    async def sleep(database: Database, speaks: asyncio.Event) -> None:
        async with database.acquire() as connection:
            speaks.clear()
            await connection.execute("SELECT pg_sleep(60)")

    async with _heard(database_url) as (database, speaks):
        call = asyncio.create_task(sleep(database, speaks))
        await until(lambda: not speaks.is_set())
        call.cancel()
        await asyncio.sleep(0.01)  # It gives its connection back.
        call.cancel()
        await asyncio.wait({call})
        await until(lambda: not (database._pool and database._pool.get_size()))
        speaks.set()


async def test_a_rollback_that_its_caller_leaves_is_made_up_for_and_nobodys_failure(database_url: str) -> None:
    lent: list[Any] = []

    async def sleep(database: Database, speaks: asyncio.Event) -> None:
        async with database.transaction() as connection:
            lent.append(connection)
            speaks.clear()
            await connection.execute("SELECT pg_sleep(60)")

    async with _heard(database_url) as (database, speaks):
        call = asyncio.create_task(sleep(database, speaks))
        await until(lambda: not speaks.is_set())
        call.cancel()
        while lent[0]._con._top_xact is not None:
            await asyncio.sleep(0)  # It rolls back, once the statement has ended.
        call.cancel()
        await asyncio.sleep(0)
        speaks.set()
        await asyncio.wait({call})
        assert call.cancelled()
