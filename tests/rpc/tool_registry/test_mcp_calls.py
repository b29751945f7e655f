"""Calls of tools of MCP servers, good and bad ones (TOOL-3)."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import grpc
import pytest
import structlog

from pawl.chassis.ids import StoreId
from pawl.event.v1 import call_pb2
from tests.files import put
from tests.poll import until
from tests.rpc.tool_registry.mcp_world import SAFE, FakeServer, McpRegistry, failure, mcp_registry, policy, refusal
from tests.rpc.tool_registry.registry import content, outcome

READ_ONLY = policy("*", category=SAFE, effect_class=call_pb2.EFFECT_CLASS_READ_ONLY)
NAMES = [
    "echo",
    "note",
    "environment",
    "fail",
    "refuse",
    "hang",
    "die",
    "die_once",
    "flood",
    "say_nothing",
    "answer_others",
    "terminate",
    "huge",
    "brackets",
    "deep",
    "wrong",
    "progress",
    "kinds",
    "change",
    "garbage",
]


@pytest.fixture
async def mcp(database_url: str, tmp_path: Path) -> AsyncIterator[McpRegistry]:
    async with mcp_registry(database_url, tmp_path) as made:
        yield made


@pytest.fixture
def server(tmp_path: Path) -> FakeServer:
    return FakeServer(tmp_path / "fake", NAMES)


async def logged(server: FakeServer, line: str) -> None:
    async def is_there() -> bool:
        return line in server.log()

    await until(is_there)


async def logged_starts(server: FakeServer, count: int) -> None:
    async def is_there() -> bool:
        return starts(server) == count

    await until(is_there)


def starts(server: FakeServer) -> int:
    return sum(line.startswith("started") for line in server.log())


async def test_a_server_gets_no_environment_but_its_own(mcp: McpRegistry, server: FakeServer) -> None:
    os.environ["PAWL_LEAK"] = "must not be seen"
    try:
        await mcp.add(server.config(environment={"CITY": "Oslo"}))
        seen: Mapping[str, str] = json.loads(content(await mcp.run("fake.environment")))
    finally:
        del os.environ["PAWL_LEAK"]
    assert set(seen) - {"LC_CTYPE"} == {"PATH", "HOME", "TMPDIR", "LANG", "CITY", "cwd"}
    assert seen["HOME"] == seen["TMPDIR"] == seen["cwd"] != str(Path.home())


async def test_an_error_of_a_tool_reaches_the_model_in_its_words(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    failed = await mcp.run("fake.fail")
    assert (outcome(failed), failure(failed)) == ("FAILED TOOL_ERROR", "no such city")
    assert "out of order" in failure(await mcp.run("fake.refuse", call="two"))
    assert content(await mcp.run("fake.note", call="three")) == "noted"
    assert starts(server) == 1


async def test_content_of_every_kind_reaches_the_model(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    assert content(await mcp.run("fake.kinds")) == {
        "content": [
            {"type": "text", "text": "words"},
            {"type": "image", "mimeType": "image/png", "bytes": 8, "data": "iVBORw0KGgo="},
            {"type": "audio", "mimeType": "audio/wav", "bytes": 3, "data": "QUJD"},
            {"type": "resource_link", "uri": "file:///a", "name": "a", "size": 3},
            {"type": "resource", "uri": "file:///b", "mimeType": "text/plain", "text": "b"},
            {"type": "resource", "uri": "file:///c", "mimeType": "x/y", "bytes": 3, "data": "QUJD"},
        ],
        "structured": {"answer": 42, "big": str(2**70)},
    }


async def test_what_is_too_large_is_left_out_with_a_note(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    result = content(await mcp.run("fake.kinds", {"times": 500_000}))
    assert result["content"][2] == {
        "type": "audio",
        "mimeType": "audio/wav",
        "bytes": 1_500_000,
        "note": "left out: it is too large for a result",
    }
    assert result["content"][5]["data"] == "QUJD", "what comes behind it is there"


async def test_progress_of_a_server_is_progress_of_the_call(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    responses = [response async for response in mcp.registry.stream("fake.progress")]
    seen = [(one.progress.fraction, one.progress.message) for one in responses if one.HasField("progress")]
    assert (0.5, "step 2") in seen


async def test_a_cancelled_call_is_cancelled_at_the_server(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    call = asyncio.create_task(mcp.run("fake.hang"))
    await logged(server, "call hang")
    assert (await mcp.registry.cancel()).stopped
    assert outcome(await call) == "CANCELLED CANCELLED"
    await logged(server, "cancelled")
    assert content(await mcp.run("fake.note", call="two")) == "noted"
    assert starts(server) == 1


async def test_a_call_that_takes_too_long_ends_and_the_server_is_told(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.registry.run_out_of_time("fake.hang")
    await logged(server, "cancelled")


async def test_a_start_goes_on_without_the_call_that_needed_it(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.connector.forget(StoreId("acme"), "fake")
    put(server.folder / "mode", "waits")
    late = await mcp.run("fake.note", call="one", timeout_seconds=0.3)
    assert outcome(late) == "FAILED TOOL_TIMEOUT"
    assert "it was never sent and has had no effect" in failure(late)
    cancelled = asyncio.create_task(mcp.run("fake.note", call="two", timeout_seconds=60))
    await logged_starts(server, 2)
    await mcp.registry.cancel("two")
    assert re.search("before it (had begun|began)", failure(await cancelled))
    (server.folder / "go").touch()
    assert content(await mcp.run("fake.note", call="three")) == "noted"
    assert starts(server) == 2, "that of the discovery, and one for all three calls"
    assert server.log().count("call note") == 1


async def test_a_call_that_was_sent_and_left_may_go_on_at_its_server(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    _, result = await mcp.registry.run_out_of_time("fake.hang")
    assert "was asked to stop; it may go on and may still have its effect" in failure(result)


async def test_a_server_that_dies_in_a_call_leaves_its_outcome_unknown(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    assert outcome(await mcp.run("fake.die_once")) == "UNKNOWN OUTCOME_UNKNOWN"
    assert server.log().count("call die_once") == 1
    assert content(await mcp.run("fake.note", call="two")) == "noted", "it is started again"


async def test_a_server_that_only_says_that_it_forgot_the_session_does_not_run_the_call_again(
    mcp: McpRegistry, server: FakeServer
) -> None:
    """Over HTTP a status says that nothing has run. The words alone may come behind the effect."""
    await mcp.add(server.config())
    assert "Session terminated" in failure(await mcp.run("fake.terminate"))
    assert server.log().count("call terminate") == 1


async def test_a_call_that_may_be_repeated_is_made_once_more(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(policies=[READ_ONLY]))
    assert content(await mcp.run("fake.die_once")) == "alive"
    assert server.log().count("call die_once") == 2


async def test_a_server_that_keeps_dying_is_started_less_and_less_often(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config(policies=[READ_ONLY]))
    told = [failure(await mcp.run("fake.die", call=f"call{number}")) for number in range(6)]
    assert any("tried again in" in text for text in told)
    assert starts(server) < 12


async def test_what_a_program_writes_to_its_standard_error_reaches_no_log_and_no_result(
    mcp: McpRegistry, server: FakeServer
) -> None:
    with structlog.testing.capture_logs() as logged_events:
        await mcp.add(server.config())
        assert content(await mcp.run("fake.note")) == "noted"
        result = await mcp.run("fake.die", call="two")
        assert "hello from the server" not in str(result)
        again = await mcp.add(server.config(policies=[READ_ONLY]), replace=True)
        assert again.problem == ""
        result = await mcp.run("fake.die", call="three")
    assert "hello from the server" not in str(result)
    told = [event for event in logged_events if "hello from the server" in str(event)]
    assert {event["log_level"] for event in told} <= {"debug"}


async def test_a_server_that_crashed_while_idle_is_started_again(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    os.kill(int(server.log()[0].split()[1]), 9)

    async def is_closed() -> bool:
        return mcp.open_count == 0

    await until(is_closed)
    assert content(await mcp.run("fake.note")) == "noted"


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        ("garbage", "UNKNOWN OUTCOME_UNKNOWN"),
        ("huge", "FAILED RESULT_TOO_LARGE"),
        ("brackets", "FAILED RESULT_TOO_LARGE"),
        ("deep", "FAILED RESULT_TOO_LARGE"),
        ("wrong", "UNKNOWN OUTCOME_UNKNOWN"),
    ],
)
async def test_an_answer_that_cannot_be_read_is_bounded_and_typed(
    mcp: McpRegistry, server: FakeServer, tool: str, expected: str
) -> None:
    await mcp.add(server.config())
    assert outcome(await mcp.run(f"fake.{tool}")) == expected
    assert content(await mcp.run("fake.note", call="two")) == "noted"


@pytest.mark.parametrize("tool", ["flood", "say_nothing", "answer_others"])
async def test_a_server_that_floods_disturbs_nobody_else(
    mcp: McpRegistry, server: FakeServer, tmp_path: Path, tool: str
) -> None:
    other = FakeServer(tmp_path / "other", ["note"])
    await mcp.add(server.config())
    await mcp.add(other.config("other"))
    flood = asyncio.create_task(mcp.run(f"fake.{tool}", timeout_seconds=100))
    await logged(server, f"call {tool}")
    for number in range(20):
        assert content(await mcp.run("other.note", call=f"note{number}")) == "noted"
    assert not flood.done()
    flood.cancel()
    assert outcome(await mcp.run(f"fake.{tool}", call="short", timeout_seconds=1)) == "FAILED TOOL_TIMEOUT"


async def test_a_server_that_describes_tools_without_end_is_not_listened_to_without_end(
    mcp: McpRegistry, server: FakeServer
) -> None:
    put(server.folder / "mode", "endless")
    with pytest.raises(grpc.aio.AioRpcError, match="it describes its tools with more than 16777216 bytes"):
        await mcp.add(server.config())


async def test_a_change_that_the_server_announces_stops_the_tool_at_once(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    await mcp.run("fake.change", {"tool": "echo"})

    async def is_refused() -> bool:
        result = await mcp.run("fake.echo", call=f"call{len(server.log())}{os.urandom(3).hex()}")
        return bool(result.result.is_error) and "NOT_ALLOWED" in failure(result)

    await until(is_refused)
    assert content(await mcp.run("fake.note", call="two")) == "noted"


async def test_calls_of_one_server_run_side_by_side(mcp: McpRegistry, server: FakeServer) -> None:
    await mcp.add(server.config())
    hanging = asyncio.create_task(mcp.run("fake.hang", call="one", timeout_seconds=20))
    await logged(server, "call hang")
    assert content(await mcp.run("fake.note", call="two")) == "noted"
    await mcp.registry.cancel("one")
    await hanging
    assert starts(server) == 1


async def test_a_connection_that_nobody_uses_is_closed_and_opened_again(database_url: str, tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "fake", ["note"])
    async with mcp_registry(database_url, tmp_path, idle_seconds=0.2) as mcp:
        await mcp.add(server.config())

        async def is_closed() -> bool:
            return mcp.open_count == 0

        await until(is_closed)
        assert content(await mcp.run("fake.note")) == "noted"
        assert starts(server) == 2


async def test_another_replica_uses_a_replaced_configuration_at_once(database_url: str, tmp_path: Path) -> None:
    server = FakeServer(tmp_path / "fake", ["environment"])
    async with (
        mcp_registry(database_url, tmp_path, name="a") as one,
        mcp_registry(database_url, tmp_path, name="b") as two,
    ):
        await one.add(server.config(environment={"CITY": "Oslo"}))
        assert json.loads(content(await two.run("fake.environment", call="1")))["CITY"] == "Oslo"
        await one.add(server.config(environment={"CITY": "Bergen"}), replace=True)
        assert json.loads(content(await two.run("fake.environment", call="2")))["CITY"] == "Bergen"
        await one.remove()
        assert await refusal(two.run("fake.environment", call="3")) == "TOOL_NOT_FOUND"
