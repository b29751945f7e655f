"""MCP calls: connections, retries and cost limits (TOOL-3)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx2
import mcp.types
import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import SourceUnreachable
from pawl.tool_registry.catalog.ports import Helper
from pawl.tool_registry.sources.mcp.attempts import ATTEMPTS_MAX, Fault, Garbled, Lost, Refused, TooLarge, check_retry
from pawl.tool_registry.sources.mcp.call import Call
from pawl.tool_registry.sources.mcp.connections import SESSIONS_MAX, Connections, SourceConnections
from pawl.tool_registry.sources.mcp.definitions import listed
from pawl.tool_registry.sources.mcp.elicitation import Reader
from pawl.tool_registry.sources.mcp.transports import RateLimit, limit_request, parse_cost
from pawl.tools.rules.definition import ToolDefinition, ToolVersion
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolContext, ToolError
from pawl.values import Category, EffectClass
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each


def a_session(problem: str = "", **more: Any) -> Any:
    return SimpleNamespace(is_open=True, is_busy=True, used_at=0.0, started_at=0.0, problem=problem, **more)


def connections() -> Connections:
    nothing: Any = None
    return Connections(secrets=nothing, clock=ManualClock(), http=nothing, programs=nothing, idle_seconds=300.0)


def fill(made: Connections, store_id: StoreId) -> int:
    line = made.by_source.setdefault(
        (store_id, "source"), SourceConnections(fingerprint=(b"", ()), clock=ManualClock())
    )
    for opened in range(SESSIONS_MAX + 1):
        try:
            made.make_room(store_id)
        except SourceUnreachable:
            return opened
        line.sessions[f"user-{opened}"] = a_session()  # type: ignore[index]
    raise AssertionError("there is no limit")


def test_each_store_gets_half_of_the_connections_that_others_leave_free() -> None:
    made = connections()
    assert [fill(made, StoreId(store)) for store in "abcdefgh"] == [100, 50, 25, 12, 6, 3, 2, 1]
    assert sum(fill(made, StoreId(f"store-{number}")) for number in range(SESSIONS_MAX)) == 1
    assert len(list(made.all())) == SESSIONS_MAX


def test_a_crashing_source_restarts_with_backoff() -> None:
    clock = ManualClock()
    line = SourceConnections(fingerprint=(b"", ()), clock=clock)
    pauses = []
    for _ in range(9):
        line.ended(None, a_session("it died"))
        pauses.append(line.not_before - clock.monotonic())
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    line.recover()
    assert line.not_before == 0.0


REPEATABLE = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT]
INTERNAL, INVALID_PARAMS = -32603, -32602


def tool(effect: EffectClass) -> ToolDefinition:
    return ToolDefinition(
        name="fake.do", description="Does.", arguments_schema={}, category=Category.SAFE, effect=effect
    )


def end(effect: EffectClass, fault: Fault, attempts: int = 1) -> str:
    try:
        check_retry(tool(effect), fault, attempts)
    except (ToolError, OutcomeUnknown) as error:
        return type(error).__name__
    return ""


@for_each("effect", list(EffectClass))
def test_a_call_that_never_ran_is_retried_for_any_effect_class(effect: EffectClass) -> None:
    assert end(effect, Lost("gone", never_ran=True)) == ""


@for_each("effect", list(EffectClass))
def test_a_call_that_may_have_run_is_retried_only_if_repeating_is_harmless(effect: EffectClass) -> None:
    is_harmless = effect in REPEATABLE
    assert end(effect, Lost("gone")) == ("" if is_harmless else "OutcomeUnknown")
    assert end(effect, Lost("gone"), ATTEMPTS_MAX) == ("ToolError" if is_harmless else "OutcomeUnknown")
    assert end(effect, Garbled()) == ("ToolError" if is_harmless else "OutcomeUnknown")
    assert end(effect, TooLarge("too much")) == "ResultTooLarge"
    assert end(effect, Refused("no")) == "ToolError"


@for_each(("effect", "has_warning"), [(EffectClass.READ_ONLY, False), (EffectClass.AT_MOST_ONCE, True)])
def test_an_error_reports_whether_the_call_may_have_taken_effect(effect: EffectClass, has_warning: bool) -> None:
    with pytest.raises(ResultTooLarge) as raised:
        check_retry(tool(effect), TooLarge("it sent too much"), 1)
    assert ("may still have taken effect" in str(raised.value)) is has_warning
    for code, may_say in ((INTERNAL, has_warning), (INVALID_PARAMS, False)):
        with pytest.raises(ToolError) as failed:
            check_retry(tool(effect), Refused("no such city", code=code), 1)
        assert ("may still have taken effect" in str(failed.value)) is may_say


REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}
NOTIFICATION = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
ANSWER = {"jsonrpc": "2.0", "id": "q1", "result": {}}


@for_each(("message", "is_limited"), [(REQUEST, False), (NOTIFICATION, True), (ANSWER, True)])
async def test_only_a_request_may_wait_without_a_read_timeout(message: Any, is_limited: bool) -> None:
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=None), trust_env=False)
    request = client.build_request("POST", "http://example.com", json=message)
    await limit_request(RateLimit(1, 1, ManualClock()), request)
    assert (request.extensions["timeout"]["read"] is not None) is is_limited
    assert request.extensions["timeout"]["connect"] == 30.0
    await client.aclose()


async def test_the_rate_limit_applies_after_a_burst() -> None:
    clock = ManualClock()
    pace = RateLimit(10, 2, clock)
    for _ in range(10):
        await pace.wait()
    late = asyncio.create_task(pace.wait(4))
    await clock.advance(1.9)
    assert not late.done()
    await clock.advance(0.2)
    assert late.done()
    await clock.advance(60)
    for _ in range(10):
        await pace.wait()


async def test_a_tool_list_that_repeats_endlessly_is_read_once() -> None:
    page = mcp.types.ListToolsResult(tools=[mcp.types.Tool(name="a", input_schema={})], next_cursor="1")
    client: Any = SimpleNamespace(session=SimpleNamespace(list_tools=AsyncMock(return_value=page)))
    tools, left_out = await listed(client, ())
    assert list(tools) == ["a"]
    assert [tool.name for tool in left_out] == ["a", "further tools"]


@for_each("flood", [b"\n", b"id\n", b"\r", b"[", b"{}"])
def test_content_that_is_slow_to_parse_counts_for_more_than_its_size(flood: bytes) -> None:
    assert parse_cost(flood * 1000, 0) > 10 * len(flood * 1000)


async def test_reports_of_questions_that_cannot_be_shown_are_limited_in_size() -> None:
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
    with pytest.raises(ToolError) as raised:
        call.outcome(mcp.types.CallToolResult(content=[]))
    assert "Which?" in str(raised.value)
    assert len(str(raised.value)) < 50_000
