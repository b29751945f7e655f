"""Limits of what an MCP server can cost those who listen to it (TOOL-3)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx2
import mcp.types
import pytest

from pawl.chassis.ids import StoreId
from pawl.tool_registry.adapters.mcp.call import Call
from pawl.tool_registry.adapters.mcp.definitions import listed
from pawl.tool_registry.adapters.mcp.elicitation import Reader
from pawl.tool_registry.adapters.mcp.transports import Pace, effort, limit_request
from pawl.tool_registry.app.catalog.ports import Helper
from pawl.tool_registry.domain.definition import ToolDefinition, ToolVersion
from pawl.tool_registry.sdk.context import ToolContext, ToolError
from pawl.values import Category, EffectClass
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each

REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}
NOTIFICATION = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
ANSWER = {"jsonrpc": "2.0", "id": "q1", "result": {}}


@for_each(("message", "is_limited"), [(REQUEST, False), (NOTIFICATION, True), (ANSWER, True)])
async def test_only_a_message_with_an_answer_may_wait_without_limit(message: Any, is_limited: bool) -> None:
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=None), trust_env=False)
    request = client.build_request("POST", "http://example.com", json=message)
    await limit_request(Pace(1, 1, ManualClock()), request)
    assert (request.extensions["timeout"]["read"] is not None) is is_limited
    assert request.extensions["timeout"]["connect"] == 30.0
    await client.aclose()


async def test_beyond_a_burst_a_pace_is_kept() -> None:
    clock = ManualClock()
    pace = Pace(10, 2, clock)
    for _ in range(10):
        await pace.keep()
    late = asyncio.create_task(pace.keep(4))
    await clock.advance(1.9)
    assert not late.done()
    await clock.advance(0.2)
    assert late.done()
    await clock.advance(60)
    for _ in range(10):
        await pace.keep()


async def test_a_list_that_repeats_itself_without_end_loses_only_what_it_repeats() -> None:
    page = mcp.types.ListToolsResult(tools=[mcp.types.Tool(name="a", input_schema={})], next_cursor="1")
    client: Any = SimpleNamespace(session=SimpleNamespace(list_tools=AsyncMock(return_value=page)))
    tools, left_out = await listed(client, ())
    assert list(tools) == ["a"]
    assert [tool.name for tool in left_out] == ["a", "what follows"]


@for_each("flood", [b"\n", b"id\n", b"\r", b"[", b"{}"])
def test_what_is_short_and_takes_long_to_read_counts_more_than_its_bytes(flood: bytes) -> None:
    assert effort(flood * 1000, 0) > 10 * len(flood * 1000)


async def test_of_questions_that_cannot_be_asked_only_so_much_is_kept() -> None:
    definition = ToolDefinition(
        name="fake.do",
        description="Does.",
        arguments_schema={},
        category=Category.SAFE,
        effect=EffectClass.AT_MOST_ONCE,
    )
    entry = ToolVersion(store_id=StoreId("acme"), definition=definition, version=1, source="mcp:fake", create_time=0.0)
    call = Call(entry, ToolContext(), (), Reader(cast("Helper", None), StoreId("acme")))
    properties: Any = {"a": {"type": "string", "pattern": "(", "description": "x" * 10_000}}
    schema = {"type": "object", "properties": properties}
    asked = mcp.types.ElicitRequestFormParams(message="Which?", requested_schema=schema)
    for _ in range(1000):
        assert (await call.ask(asked)).action == "decline"
    with pytest.raises(ToolError) as told:
        call.outcome(mcp.types.CallToolResult(content=[]))
    assert "Which?" in str(told.value)
    assert len(str(told.value)) < 50_000
