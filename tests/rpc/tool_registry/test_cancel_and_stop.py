"""Calls that are cancelled, and processes that are asked to stop. C5, I12, OPS-5."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tools import Category, EffectClass, ToolContext, happened, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, outcome, reason, running
from tests.rpc.tool_registry.world import World, database_is_told, dead_process


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, world: World) -> Any:
    async with running(database_url, tmp_path, world.tools()) as registry:
        yield registry


async def test_a_running_call_is_cancelled_and_stays_so(registry: Registry, world: World) -> None:
    """C5: a cancelled execution was once overwritten as completed."""
    asked = asyncio.ensure_future(registry.run("pay", {"wait": True}))
    await world.begun.wait()
    answer = await registry.cancel()
    assert answer.stopped
    assert outcome(answer.result) == "CANCELLED CANCELLED"
    world.release.set()
    assert await asked == answer.result
    assert await registry.run("pay", {"wait": True}) == answer.result
    assert (await registry.cancel()).result == answer.result
    assert world.effects == []


async def test_a_call_cancelled_before_it_began_never_begins(registry: Registry, world: World) -> None:
    """I12."""
    answer = await registry.cancel()
    assert answer.stopped
    assert not answer.HasField("result")
    assert outcome(await registry.run("pay")) == "CANCELLED CANCELLED"
    assert world.effects == []


async def test_a_call_that_ended_is_not_undone_by_a_cancel(registry: Registry, world: World) -> None:
    done = await registry.run("pay")
    answer = await registry.cancel()
    assert (answer.stopped, answer.result) == (True, done)
    assert await registry.run("pay") == done


async def test_a_call_is_cancelled_in_whatever_replica_it_runs(
    database_url: str, tmp_path: Path, registry: Registry, world: World
) -> None:
    async with running(database_url, tmp_path, world.tools(), name="b") as other:
        asked = asyncio.ensure_future(registry.run("pay", {"wait": True}))
        await world.begun.wait()
        answer = await other.cancel(wait=10)
        assert answer.stopped
        assert outcome(answer.result) == "CANCELLED CANCELLED"
        assert await asked == answer.result
    assert world.effects == []


async def test_a_cancel_that_cannot_wait_longer_says_so(database_url: str, registry: Registry, world: World) -> None:
    async with dead_process(database_url, registry, "pay", "call"):
        await database_is_told(database_url, alive=True)
        assert not (await registry.cancel(wait=0.2)).stopped


@pytest.fixture
def deaf() -> Iterator[threading.Event]:
    """Ends a thread that does not listen to its cancel."""
    release = threading.Event()
    yield release
    release.set()


async def test_a_thread_that_cannot_be_stopped_is_said_to_go_on(
    database_url: str, tmp_path: Path, deaf: threading.Event
) -> None:
    """C5, I5: its effect may still come, and everybody who asks is told so."""
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool(category=Category.SAFE)
    def ship() -> str:
        """Ship."""
        loop.call_soon_threadsafe(begun.set)
        deaf.wait(30)
        return "shipped"

    async with running(database_url, tmp_path, [ship]) as registry:
        asked = asyncio.ensure_future(registry.run("ship"))
        await begun.wait()
        answer = await registry.cancel()
        assert not answer.stopped
        assert outcome(answer.result) == "CANCELLED NOT_STOPPED"
        assert "may still have its effect" in content(answer.result)["error"]
        assert await asked == answer.result
        deaf.set()
        assert await registry.run("ship") == answer.result
        again = await registry.cancel()
        assert (again.stopped, again.result) == (False, answer.result)


async def test_a_thread_that_listens_is_stopped(database_url: str, tmp_path: Path) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @tool(category=Category.SAFE)
    def ship(context: ToolContext) -> str:
        """Ship."""
        loop.call_soon_threadsafe(begun.set)
        context.wait_cancelled(30)
        context.check_cancelled()
        return "shipped"

    async with running(database_url, tmp_path, [ship]) as registry:
        asked = asyncio.ensure_future(registry.run("ship"))
        await begun.wait()
        answer = await registry.cancel()
        assert answer.stopped
        assert outcome(answer.result) == "CANCELLED CANCELLED"
        assert await asked == answer.result


async def test_a_cancelled_call_whose_process_died_is_unknown(
    database_url: str, registry: Registry, world: World
) -> None:
    """I5: nothing of it runs any more, and nobody knows what it has done."""
    async with dead_process(database_url, registry, "pay", "call"):
        answer = await registry.cancel()
        assert answer.stopped
        assert outcome(answer.result) == "UNKNOWN OUTCOME_UNKNOWN"
    assert world.effects == []


async def test_a_call_without_a_journal_is_cancelled_in_whatever_replica_it_runs(
    database_url: str, tmp_path: Path
) -> None:
    """I12: its caller may be cut off from the replica, or hang, and never end its stream."""
    begun = asyncio.Event()

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def look() -> str:
        """Look for ever."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    async with (
        running(database_url, tmp_path, [look]) as registry,
        running(database_url, tmp_path, [look], name="b") as other,
    ):
        asked = asyncio.ensure_future(registry.run("look", timeout_seconds=300))
        await begun.wait()
        assert (await other.cancel()).stopped
        assert outcome(await asked) == "CANCELLED CANCELLED"
        assert registry.executor.running_count == 0


@pytest.mark.parametrize("wait", [-1.0, 10.5, float("nan")])
async def test_a_wait_out_of_range_is_refused(registry: Registry, wait: float) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await registry.cancel(wait=wait)
    assert reason(error.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", {"field": "wait_seconds"})


async def test_at_a_stop_running_calls_have_a_grace_to_end(database_url: str, tmp_path: Path, world: World) -> None:
    """OPS-5."""
    async with running(database_url, tmp_path, world.tools(), drain_seconds=20) as registry:
        stream = registry.stream("pay", {"wait": True})
        reading = asyncio.ensure_future(stream.read())
        await world.begun.wait()
        stream.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        asyncio.get_running_loop().call_later(0.2, world.release.set)
    assert world.effects == ["paid 1"]
    async with running(database_url, tmp_path, world.tools()) as registry:
        assert content(await registry.run("pay", {"wait": True})) == "paid 1"


async def test_what_does_not_end_at_a_stop_is_recorded_as_what_it_is(
    database_url: str, tmp_path: Path, world: World
) -> None:
    """An effect that may have happened is unknown; a tool that can be asked is asked."""
    async with running(database_url, tmp_path, world.tools(), drain_seconds=0.1) as registry:
        streams = [registry.stream(name, {"wait": True}, call=name) for name in ("pay", "order")]
        reading = [asyncio.ensure_future(stream.read()) for stream in streams]

        async def both_run() -> bool:
            return registry.executor.running_count == 2 and world.begun.is_set()

        await until(both_run)
    ended = await asyncio.gather(*reading, return_exceptions=True)
    assert len(ended) == 2
    world.finding = happened("order 7")
    world.release.set()
    async with running(database_url, tmp_path, world.tools()) as registry:
        assert outcome(await registry.run("pay", {"wait": True}, call="pay")) == "UNKNOWN OUTCOME_UNKNOWN"
        assert content(await registry.run("order", {"wait": True}, call="order")) == "order 7"
    assert world.effects == ["asked about order"]
