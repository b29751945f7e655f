"""Tools of MCP servers that are called as tasks: begun once, polled until they end, through crashes (ASYNC-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.ids import StoreId
from tests.files import put
from tests.rpc.tool_registry.mcp_world import (
    READ_ONLY,
    UNKNOWN,
    FakeServer,
    McpRegistry,
    a_tool,
    answer,
    failure,
    mcp_registry,
)
from tests.rpc.tool_registry.registry import content, outcome

TOO_LARGE = "FAILED RESULT_TOO_LARGE"


class Hurried(SystemClock):
    """A clock with which pauses are short."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 20)


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path, clock=Hurried()) as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    made = FakeServer(tmp_path / "fake", ())
    task = {"execution": {"taskSupport": "required"}}
    made.describe([a_tool(name, **task) for name in ("echo", "fail", "ask", "log_in")] + [a_tool("hang")])
    return made


Interrupted = Callable[[str], AbstractAsyncContextManager[McpRegistry]]


@pytest.fixture
def interrupted(database_url: str, tmp_path: Path, server: FakeServer) -> Interrupted:
    """Begin a call as a task in a registry that then ends; gives the next registry."""

    @asynccontextmanager
    async def restarted(tool: str) -> AsyncIterator[McpRegistry]:
        async with mcp_registry(database_url, tmp_path) as one:
            await one.add(server.config())
            first = asyncio.create_task(one.run(tool, {"city": "Oslo"} if tool == "fake.echo" else None))
            await server.logged("get task-0")
        await asyncio.gather(first, return_exceptions=True)
        (tmp_path / "b").mkdir()
        async with mcp_registry(database_url, tmp_path / "b") as other:
            yield other
        assert begun(server) == 1

    return restarted


def end(server: FakeServer, state: str = "completed") -> None:
    put(server.folder / "ends", state)


def begun(server: FakeServer) -> int:
    return sum(line.startswith("begun") for line in server.log())


async def test_a_tool_that_demands_a_task_is_begun_and_polled_until_it_ends(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {"city": "Oslo"}))
    await server.logged("get task-0", times=2)
    assert not running.done()
    for _, session in list(mcp.connections.all()):
        session.stop()  # A server that dies meanwhile is polled again.
    end(server)
    assert content(await running) == '{"city": "Oslo"}'
    assert begun(server) == 1
    end(server, "working")
    said = []
    async for response in mcp.registry.stream("fake.echo", {}, call="progress"):
        if response.WhichOneof("kind") == "progress":
            said.append(response.progress.message)
            end(server)
    assert said[0] == "it is working"


async def test_a_task_that_fails_or_is_cancelled_by_its_server_says_so(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    end(server, "failed")
    failed = await mcp.run("fake.fail", {})
    assert (outcome(failed), failure(failed)) == ("FAILED TOOL_ERROR", "no such city")
    end(server, "cancelled")
    assert "its server cancelled it" in failure(await mcp.run("fake.echo", {}, call="two"))


async def test_a_call_whose_registry_ends_continues_and_is_begun_once(
    interrupted: Interrupted, server: FakeServer
) -> None:
    async with interrupted("fake.echo") as other:
        second = asyncio.create_task(other.run("fake.echo", {"city": "Oslo"}, earlier_attempts=1))
        await server.logged("get task-0", times=server.log().count("get task-0") + 1)
        end(server)
        assert content(await second) == '{"city": "Oslo"}'
    assert "cancel task-0" not in server.log()


async def test_a_task_asks_the_user_also_after_its_registry_has_ended(
    interrupted: Interrupted, server: FakeServer
) -> None:
    async with interrupted("fake.ask") as other:
        end(server, "input_required")
        asked = await other.run("fake.ask", earlier_attempts=1)
        assert outcome(asked) == "INPUT_REQUIRED"
        done = await other.run("fake.ask", answers=[answer(asked, "large")], earlier_attempts=2)
        assert content(done) == '{"action": "accept", "content": {"size": "large"}}'


async def test_no_task_reopens_a_source_that_was_removed(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await server.logged("get task-0")
    await mcp.remove()
    end(server)
    assert outcome(await running) == UNKNOWN
    assert mcp.open_count == 0


async def test_cancelling_the_call_cancels_the_task(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    running = asyncio.create_task(mcp.run("fake.echo", {}))
    await server.logged("get task-0")
    await mcp.registry.cancel()
    assert outcome(await running).startswith("CANCELLED")
    await server.logged("cancel task-0")


async def test_a_call_that_may_be_made_again_begins_another_task_for_one_that_is_lost(
    mcp: McpRegistry, server: FakeServer
) -> None:
    await mcp.add(server.config(policies=[READ_ONLY]))
    left = mcp.registry.stream("fake.echo", {"city": "Oslo"})
    await anext(aiter(left))
    await server.logged("get task-0")
    left.cancel()
    await server.logged("cancel task-0")
    again = asyncio.create_task(mcp.run("fake.echo", {"city": "Oslo"}, earlier_attempts=1))
    await server.logged("get task-1")
    end(server)
    assert content(await again) == '{"city": "Oslo"}'
    assert begun(server) == 2


async def test_a_task_that_cannot_be_followed_has_a_typed_end_and_no_second_effect(
    mcp: McpRegistry, server: FakeServer
) -> None:
    end(server)
    await mcp.add(server.config())
    rows = [
        ("get busy", UNKNOWN, 3),
        ("get unknown", UNKNOWN, 1),
        ("get wrong", UNKNOWN, 1),
        ("get another", UNKNOWN, 1),
        ("get huge", TOO_LARGE, 1),
        ("result unknown", UNKNOWN, 3),
        ("result wrong", UNKNOWN, 1),
        ("result another", UNKNOWN, 1),
        ("result huge", TOO_LARGE, 1),
        ("result die", UNKNOWN, 3),
    ]
    for number, (fault, expected, asked) in enumerate(rows):
        method, kind = fault.split()
        put(server.folder / f"fault-{method}", kind)
        assert outcome(await mcp.run("fake.echo", {}, call=f"c{number}", timeout_seconds=60)) == expected, fault
        assert server.log().count(f"{method} task-{number}") == asked, fault
        (server.folder / f"fault-{method}").unlink()
        await mcp.connector.forget(StoreId("acme"), "fake")  # Else it would wait before the next start.
    assert begun(server) == len(rows)


async def test_a_result_instead_of_a_task_is_the_result_and_a_task_needs_a_usable_id(
    mcp: McpRegistry, server: FakeServer
) -> None:
    """A server may do immediately what it was asked to do as a task."""
    await mcp.add(server.config())
    for number, said in enumerate((None, "soon", 7, {"taskId": 7})):
        put(server.folder / "at_once", json.dumps({"content": [{"type": "text", "text": "done"}], "task": said}))
        assert content(await mcp.run("fake.echo", {}, call=f"now{number}", timeout_seconds=60)) == "done"
    (server.folder / "at_once").unlink()
    for number, task_id in enumerate(("", "a\nb", "x" * 20_000)):
        put(server.folder / "task_id", json.dumps(task_id))
        assert outcome(await mcp.run("fake.echo", {}, call=f"id{number}", timeout_seconds=60)) == UNKNOWN


async def test_what_a_server_says_of_a_task_is_kept_within_limits(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    rows = [
        ({"pollInterval": -5}, "SUCCEEDED"),
        ({"ttl": 10**400}, "SUCCEEDED"),
        ({"pollInterval": 10**400}, "FAILED TOOL_TIMEOUT"),
        ({"pollInterval": "soon"}, UNKNOWN),
        ({"ttl": float("nan")}, UNKNOWN),
    ]
    for number, (said, expected) in enumerate(rows):
        end(server, "working")
        put(server.folder / "fault-get", json.dumps(said))
        seconds = 2 if "TIMEOUT" in expected else 60
        running = asyncio.create_task(mcp.run("fake.echo", {}, call=f"c{number}", timeout_seconds=seconds))
        if expected == "SUCCEEDED":
            await server.logged(f"get task-{number}", times=3)
            end(server)
            (server.folder / "fault-get").unlink()
        assert outcome(await running) == expected, said


async def test_a_task_of_which_nobody_can_be_asked_is_unknown(interrupted: Interrupted, server: FakeServer) -> None:
    """Its server cannot be started any more: the task continues all the same."""
    async with interrupted("fake.echo") as other:
        put(server.folder / "mode", "broken")
        result = await other.run("fake.echo", {"city": "Oslo"}, earlier_attempts=1, timeout_seconds=60)
        assert outcome(result) == UNKNOWN


async def test_a_task_that_fails_after_its_registry_went_away_fails_its_call(
    interrupted: Interrupted, server: FakeServer
) -> None:
    async with interrupted("fake.fail") as other:
        end(server, "failed")
        assert failure(await other.run("fake.fail", earlier_attempts=1)) == "no such city"
