"""TOOL-2, TOOL-6: the registry enforces the declared properties of tools. Each property has its own group of tests."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, tool_pb2
from pawl.tools import Category, EffectClass, Tool, ToolContext, tool
from tests.rpc.tool_registry.registry import (
    Registry,
    content,
    context,
    outcome,
    proposed,
    refusal,
    running,
)
from tests.rpc.tool_registry.world import execute

SAFE = Category.SAFE
READ_ONLY = EffectClass.READ_ONLY


class Tools:
    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.fails = False

    def all(self) -> list[Tool[..., Any]]:
        @tool(category=SAFE, rate_per_minute=2)
        async def rare(n: int = 0) -> None:
            """Run with a rate limit."""
            self.ran["rare"] += 1

        @tool(category=SAFE, effect=READ_ONLY, cache_seconds=60)
        async def kept(context: ToolContext, n: int = 0) -> str:
            """Return a cached result."""
            self.ran["kept"] += 1
            if self.fails:
                raise RuntimeError
            return f"{n} for {context.user_id} of {context.store_id}"

        counted: dict[str, dict[str, Any]] = {
            "once": {"effect": EffectClass.AT_MOST_ONCE},
            "again": {"effect": EffectClass.IDEMPOTENT},
            "glance": {"rate_per_minute": 1},
            "kept_small": {"cache_seconds": 60, "result_bytes_max": 5},
            "fresh": {},
            "for_ann": {"allowed_users": ["ann"]},
            "for_operators": {"allowed_roles": ["operator", "admin"]},
            "for_both": {"allowed_users": ["olga", "bob"], "allowed_roles": ["operator"]},
        }
        return [rare, kept, *(self.counted(name, options) for name, options in counted.items())]

    def counted(self, name: str, options: dict[str, Any]) -> Tool[..., Any]:
        """Return a tool that only counts its calls. It is read-only unless `options` change that."""

        async def count() -> str:
            self.ran[name] += 1
            return "counted"

        return tool(name=name, description="Count.", **{"category": SAFE, "effect": READ_ONLY} | options)(count)


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, tools: Tools) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools.all()) as found:
        yield found


RESTRICTED = {"for_ann", "for_operators", "for_both"}


async def test_caller_restriction_applies_to_runs_with_an_older_version(database_url: str, tmp_path: Path) -> None:
    @tool(name="open_book", category=SAFE, effect=READ_ONLY)
    async def before() -> None:
        """For all users."""

    @tool(name="open_book", category=SAFE, effect=READ_ONLY, allowed_roles=["operator"])
    async def after() -> None:
        """For operators only."""

    async with running(database_url, tmp_path, [before]) as registry:
        assert outcome(await registry.run("open_book")) == "SUCCEEDED"
    async with running(database_url, tmp_path, [after]) as registry:
        assert (await registry.check("open_book", version=1)).error_reason == "TOOL_NOT_FOUND"
        assert await refusal(registry.stream("open_book", version=1)) == "TOOL_NOT_FOUND"


async def test_store_rate_limit_spans_replicas_and_returns_a_retry_time(
    database_url: str, tmp_path: Path, tools: Tools
) -> None:
    async with (
        running(database_url, tmp_path, tools.all(), name="a") as first,
        running(database_url, tmp_path, tools.all(), name="b") as second,
    ):
        ended = await asyncio.gather(*((first, second)[n % 2].run("rare", call=f"c{n}") for n in range(8)))
        over = next(each for each in ended if outcome(each) == "FAILED RATE_LIMITED")
        assert re.search(r"Try again in [123]?\d s", content(over)["error"])
        elsewhere = await first.run("rare", call="other", who=context(store="other"))
    assert Counter(map(outcome, ended)) == {"SUCCEEDED": 2, "FAILED RATE_LIMITED": 6}
    assert (outcome(elsewhere), tools.ran["rare"]) == ("SUCCEEDED", 3)


async def test_rate_limit_counts_a_call_once_and_recovers_over_time(registry: Registry, database_url: str) -> None:
    moved = "UPDATE tool_registry.rates SET unused_at = unused_at + interval '{} seconds'"
    for attempt in range(3):
        assert outcome(await registry.run("glance", call="c0", earlier_attempts=attempt)) == "SUCCEEDED"
    # One per minute: a database clock that was set back must not block calls for long.
    for number, (seconds, expected) in enumerate(
        ((-30, "FAILED RATE_LIMITED"), (-30, "SUCCEEDED"), (1000, "SUCCEEDED"), (0, "FAILED RATE_LIMITED")), 1
    ):
        await execute(database_url, moved.format(seconds))
        assert outcome(await registry.run("glance", call=f"c{number}")) == expected, number
    await execute(database_url, "ALTER TABLE tool_registry.rates RENAME TO rates_away")
    try:
        assert outcome(await registry.run("fresh")) == "SUCCEEDED", "a tool without a rate limit runs no statement"
    finally:
        await execute(database_url, "ALTER TABLE tool_registry.rates_away RENAME TO rates")


async def test_rate_limit_of_a_store_covers_all_its_tools(database_url: str, tmp_path: Path, tools: Tools) -> None:
    async with running(database_url, tmp_path, tools.all(), store_calls_per_minute=3) as registry:
        ended = [await registry.run(name, call=f"c{name}") for name in ("rare", "once", "again", "fresh")]
        assert list(map(outcome, ended)) == ["SUCCEEDED"] * 3 + ["FAILED RATE_LIMITED"]
        # Calls rejected by the store limit do not count against the tool limit, and vice versa.
        await execute(database_url, "DELETE FROM tool_registry.rates WHERE name = 'store'")
        names = ["rare", "rare", "fresh", "fresh", "fresh"]
        ended = [await registry.run(name, call=f"d{number}") for number, name in enumerate(names)]
    assert [outcome(each) == "FAILED RATE_LIMITED" for each in ended] == [False, True, False, False, True]


async def test_cache_returns_the_result_for_the_same_arguments_user_and_store(registry: Registry, tools: Tools) -> None:
    tools.fails = True
    assert outcome(await registry.run("kept", {"n": 1}, call="c")) == "FAILED TOOL_ERROR"
    tools.fails = False
    rows = [(1, "acme", "ann"), (2, "acme", "ann"), (1, "acme", "bob"), (1, "other", "ann"), (1, "acme", "ann")]
    for number, (n, store, user) in enumerate(rows):
        result = await registry.run("kept", {"n": n}, call=f"c{number}", who=context(store=store, user=user))
        assert content(result) == f"{n} for {user} of {store}"
        assert bool(result.result.note) is (number == 4)
    assert re.fullmatch(r"From the cache: this result is \d+ s old\.", result.result.note)
    assert tools.ran["kept"] == 5, "errors are not cached"
    entries = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest(call_id="c4"))).entries
    assert [entry.reason for entry in entries] == ["CACHED"]
    for number in range(2):
        assert outcome(await registry.run("kept_small", call=f"s{number}")) == "FAILED RESULT_TOO_LARGE"
        await registry.run("fresh", call=f"f{number}")
    assert (tools.ran["kept_small"], tools.ran["fresh"]) == (2, 2)


async def test_caller_restriction_hides_the_tool_from_others(registry: Registry) -> None:
    """TOOL-6: agent-loop cannot resolve, check or execute the tool for other users, and they cannot get or list it."""
    for user, roles, known in (
        ("ann", (), {"for_ann"}),
        ("bob", (), set()),
        ("bob", ("operator",), {"for_operators", "for_both"}),
        ("eve", ("admin", "member"), {"for_operators"}),
        ("eve", ("member",), set()),
    ):
        behalf = context(user=user, roles=roles)
        resolve = registry.execution.ResolveTools
        everything = await resolve(execution_pb2.ResolveToolsRequest(context=behalf))
        assert {found.definition.name for found in everything.tools} & RESTRICTED == known
        for name in sorted(RESTRICTED):
            verdict = await registry.check(name, user=user, roles=roles)
            assert (verdict.error_reason, verdict.tool_version) == (("", 1) if name in known else ("TOOL_NOT_FOUND", 0))
            named = execution_pb2.ResolveToolsRequest(context=behalf, tool_names=[name])
            pinned = execution_pb2.ResolveToolsRequest(context=behalf, pinned_versions={name: 1})
            call = registry.stream(name, who=behalf, call=f"{user}_{len(roles)}_{name}")
            if name in known:
                assert len((await resolve(named)).tools) == 1
                assert [response async for response in call][-1].HasField("result")
            else:
                assert await refusal(resolve(named)) == await refusal(call) == "TOOL_NOT_FOUND"
                assert name not in {one.definition.name for one in (await resolve(pinned)).tools}
    for user, known in (("ann", {"for_ann"}), ("bob", set()), ("olga", {"for_operators", "for_both"})):
        stub = registry.users["acme", user]
        listed = (await stub.ListTools(tool_pb2.ListToolsRequest(page_size=200))).tools
        assert {found.definition.name for found in listed} & RESTRICTED == known
        for name in RESTRICTED - known:
            assert await refusal(stub.GetTool(tool_pb2.GetToolRequest(name=name))) == "TOOL_NOT_FOUND"


async def test_duplicate_write_in_a_batch_is_rejected(registry: Registry) -> None:
    """A later batch may repeat a call on purpose."""
    calls: list[tuple[str, Any]] = [
        ("rare", {"n": 1}),
        ("rare", {"n": 2}),
        ("fresh", {}),
        ("fresh", {}),
        ("rare", b'{ "n" : 1.0 }'),
        ("again", {}),
        ("again", {}),
        ("rare", {"n": "x"}),
        ("rare", {"n": "x"}),
    ]
    duplicate, invalid = "DUPLICATE_CALL", "INVALID_ARGUMENTS"
    for _ in range(2):
        verdicts = await registry.verdicts(*(proposed(f"c{n}", *call) for n, call in enumerate(calls, 1)))
        reasons = [verdict.error_reason for verdict in verdicts]
        assert reasons == ["", "", "", "", duplicate, "", duplicate, invalid, invalid]
    assert (verdicts[4].disposition, verdicts[4].arguments_json) == (execution_pb2.DISPOSITION_REFUSE, b"")
