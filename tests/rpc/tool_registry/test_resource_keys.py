"""Calls with the same resource key run one at a time, in all runs and replicas of a store (LOOP-9, C4)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import DependencyUnavailable
from pawl.server.db.database import Database
from pawl.tool_registry.execution.execution import LeaseWatch
from pawl.tool_registry.execution.store.locks import PostgresResourceLocks
from pawl.tools import Category, EffectClass, Tool, ToolContext, tool
from tests.poll import until
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, running
from tests.rpc.tool_registry.world import execute


@dataclass
class Files:
    at: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    edits: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    thread_release: threading.Event = field(default_factory=threading.Event)

    def tools(self) -> list[Tool[..., Any]]:
        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["path:{path}"], timeout_seconds=30)
        async def edit(context: ToolContext, path: str) -> str:
            """Edit a file."""
            await self.visit([f"{context.store_id}/{path}"])
            return path

        @tool(category=Category.SAFE, resource_keys=["path:{paths}"], timeout_seconds=30)
        async def move(context: ToolContext, paths: list[str]) -> str:
            """Move files."""
            await self.visit([f"{context.store_id}/{path}" for path in paths])
            return "moved"

        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["path:{path}"], timeout_seconds=30)
        async def hold(path: str) -> str:
            """Hold a file until it is released."""
            self.edits.append("held")
            await self.release.wait()
            return path

        @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, resource_keys=["path:{path}"])
        def block(path: str) -> str:
            """Write to a file for longer than there is time."""
            self.edits.append("held")
            self.thread_release.wait(30)
            self.edits.append("written late")
            return path

        return [edit, move, hold, block]

    async def visit(self, paths: list[str]) -> None:
        for path in paths:
            self.at[path] = self.at.get(path, 0) + 1
            self.most[path] = max(self.most.get(path, 0), self.at[path])
        await asyncio.sleep(0.01)  # A wrong result would appear within this time; no assertion depends on it
        for path in paths:
            self.at[path] -= 1
            self.edits.append(path)

    def holds(self, count: int) -> Callable[[], Any]:
        return lambda: self.edits.count("held") == count


async def none_held(database_url: str) -> None:
    """Wait until all keys are released. A call may release its key after it returned its result."""
    async with Database(database_url, application_name="test") as database:
        await until(lambda: database.fetchval("SELECT count(*) = 0 FROM tool_registry.resource_locks"))


@pytest.fixture
def files() -> Files:
    return Files()


@pytest.fixture
async def replicas(database_url: str, tmp_path: Path, files: Files) -> Any:
    async with (
        running(database_url, tmp_path, files.tools(), name="a") as a,
        running(database_url, tmp_path, files.tools(), name="b") as b,
    ):
        yield [a, b]


async def test_timed_out_thread_keeps_its_key_until_it_ends(replicas: list[Registry], files: Files) -> None:
    """Late writes of the thread must not overlap with the next call."""
    await replicas[0].run_out_of_time("block", {"path": "x"}, call="late")
    waited = await replicas[1].run("edit", {"path": "x"}, call="early", timeout_seconds=0.3)
    assert outcome(waited) == "FAILED TOOL_TIMEOUT"
    asked = asyncio.ensure_future(replicas[1].run("edit", {"path": "x"}, call="next"))
    files.thread_release.set()
    assert (outcome(await asked), files.edits) == ("SUCCEEDED", ["held", "written late", "acme/x"])


async def test_lock_acquisition_is_retried_after_a_deadlock(replicas: list[Registry], database_url: str) -> None:
    admin, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    row = "INSERT INTO tool_registry.resource_locks VALUES ('acme', $1, 'other', 'dead')"
    waits = "SELECT true FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))"
    async with Database(database_url, application_name="test") as database:
        locks = PostgresResourceLocks(database, instance_id=replicas[0].instance_id, watch=LeaseWatch(30))
        pid = other.get_server_pid()
        transaction = other.transaction()
        await transaction.start()
        await other.execute(row, "path:b")
        async with AsyncExitStack() as stack:
            holding = asyncio.ensure_future(
                stack.enter_async_context(locks.hold(StoreId("acme"), ["path:a", "path:b"], "call"))
            )
            await until(lambda: admin.fetchval(waits, pid))
            # Each waits for the other until the database aborts one of them.
            with suppress(asyncpg.DeadlockDetectedError):
                await other.execute(row, "path:a")
            await transaction.rollback()
            await holding
    await none_held(database_url)
    await other.close()
    await admin.close()


async def test_lock_is_released_if_its_commit_outlives_the_connection(
    replicas: list[Registry], database_url: str
) -> None:

    async def hold(locks: PostgresResourceLocks) -> None:
        async with locks.hold(StoreId("acme"), ["path:x"], "slow"):
            raise AssertionError("a call runs without its key")

    admin = await asyncpg.connect(database_url)
    await admin.execute(
        "CREATE FUNCTION pg_temp.wait() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;"
        " CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON tool_registry.resource_locks DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (new.holder LIKE 'slow%') EXECUTE FUNCTION pg_temp.wait()"
    )
    async with Database(database_url, application_name="test") as database:
        locks = PostgresResourceLocks(database, instance_id=replicas[0].instance_id, watch=LeaseWatch(30))
        await admin.execute("SELECT pg_advisory_lock(7)")
        holding = asyncio.ensure_future(hold(locks))
        await until(lambda: admin.fetchval("SELECT true FROM pg_locks WHERE objid = 7 AND NOT granted"))
        database._cut()
        await asyncio.wait({holding}, timeout=0.3)  # It waits for the COMMIT; an error would appear in this time
        await admin.execute("SELECT pg_advisory_unlock(7)")
        await raises(DependencyUnavailable, holding)
    await none_held(database_url)
    await admin.close()


async def test_calls_with_common_keys_never_overlap_or_deadlock(
    replicas: list[Registry], files: Files, database_url: str
) -> None:
    """C4: concurrent edits of one file must not be lost. The key of a dead process is released."""
    await execute(database_url, "INSERT INTO tool_registry.resource_locks VALUES ('acme', 'path:x', 'call', 'dead')")
    calls = [
        replicas[number % 2].run("edit", {"path": "x"}, call=f"c{number}", who=context(run=f"run{number % 3}"))
        for number in range(12)
    ]
    pairs = [["a", "b"], ["b", "a"], ["b", "c"], ["c", "a"]] * 2
    calls += [replicas[number % 2].run("move", {"paths": pair}, call=f"m{number}") for number, pair in enumerate(pairs)]
    assert {outcome(result) for result in await asyncio.gather(*calls)} == {"SUCCEEDED"}
    assert (files.most, files.edits.count("acme/x")) == (dict.fromkeys((f"acme/{name}" for name in "xabc"), 1), 12)
    await none_held(database_url)


async def test_a_held_key_blocks_only_calls_that_need_it_and_only_within_their_timeout(
    replicas: list[Registry], files: Files, database_url: str
) -> None:
    """LOOP-6: a call that waits too long times out, and a call that is cancelled while it waits never runs."""
    here, there = replicas
    stored = await here.run("move", {"paths": ["x"]}, call="m")
    holding = asyncio.ensure_future(here.run("hold", {"path": "x"}, call="h"))
    await until(files.holds(1))
    assert content(await there.run("edit", {"path": "y"}, call="a")) == "y"
    assert content(await there.run("edit", {"path": "x"}, call="b", who=context(store="other"))) == "x"
    assert await there.run("move", {"paths": ["x"]}, call="m") == stored, "a stored result needs no key"
    for replica in replicas:
        waited = await replica.run("edit", {"path": "x"}, call=f"w-{replica.instance_id}", timeout_seconds=0.2)
        assert outcome(waited) == "FAILED TOOL_TIMEOUT"
    stream = there.stream("edit", {"path": "x"}, call="left")
    reading = asyncio.ensure_future(stream.read())
    await until(lambda: there.executor.running_count == 1)
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: there.executor.running_count == 0)
    assert "acme/x" not in files.edits[1:]
    files.release.set()
    await holding
    assert content(await there.run("edit", {"path": "x"}, call="after")) == "x"
    await none_held(database_url)
