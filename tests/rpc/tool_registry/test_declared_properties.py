"""The registry enforces the declared properties of tools, and may run reads with their check (TOOL-2, TOOL-6)."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, tool_pb2
from pawl.tool_registry.execution import executor
from pawl.tools import Category, EffectClass, Tool, ToolContext, ToolError, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, proposed, refusal, running
from tests.rpc.tool_registry.test_audit import fields_of, listed
from tests.rpc.tool_registry.test_rules import ALLOW, make
from tests.rpc.tool_registry.world import execute

SAFE = Category.SAFE
READ_ONLY = EffectClass.READ_ONLY


@dataclass
class Tools:
    ran: Counter[str] = field(default_factory=Counter)
    fails: bool = False

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


@dataclass
class ReadTools:
    ran: Counter[str] = field(default_factory=Counter)
    release: asyncio.Event = field(default_factory=asyncio.Event)

    def all(self) -> list[Tool[..., Any]]:
        @tool(category=SAFE, effect=READ_ONLY)
        def look(n: int = 0) -> int:
            """Look."""
            self.ran["look"] += 1
            return n

        @tool(category=SAFE, effect=READ_ONLY)
        async def slow() -> str:
            """Look for a long time."""
            self.ran["slow"] += 1
            await self.release.wait()
            return "found"

        @tool(category=SAFE, effect=READ_ONLY)
        def fail() -> str:
            """Fail."""
            raise ToolError("there is nothing")

        @tool(category=SAFE, effect=READ_ONLY)
        async def asking(context: ToolContext) -> str:
            """Ask."""
            return await context.ask("Which?")

        counted: dict[str, dict[str, Any]] = {
            "large_kept": {"cache_seconds": 60},
            "counted": {"rate_per_minute": 5},
            "locked": {"resource_keys": ["desk"]},
            "note": {"effect": EffectClass.IDEMPOTENT},
            "private": {"category": Category.SENSITIVE},
        }
        return [look, slow, fail, asking, *(self.counted(name, options) for name, options in counted.items())]

    def counted(self, name: str, options: dict[str, Any]) -> Tool[..., Any]:
        def count() -> str:
            self.ran[name] += 1
            return "x" * 300_000

        return tool(name=name, description="Count.", **{"category": SAFE, "effect": READ_ONLY} | options)(count)


async def checked(reading: Registry, *calls: tuple[str, str, Any], reads: bool = True) -> list[execution_pb2.Verdict]:
    timeouts = execution_pb2.ExecuteReads(timeout_seconds=10, timeout_seconds_max=100) if reads else None
    return await reading.verdicts(*(proposed(*call) for call in calls), execute_reads=timeouts)


async def until_read(reading: Registry, call: str, name: str) -> execution_pb2.Verdict:
    """Check new calls, whose ids start with `call`, until a verdict includes a result.

    On a busy machine the read may take longer than the check.
    """
    verdicts: list[execution_pb2.Verdict] = []

    async def has_result() -> bool:
        verdicts[:] = await checked(reading, (f"{call}{len(verdicts)}", name, {}))
        return verdicts[0].HasField("result")

    await until(has_result)
    return verdicts[0]


@pytest.fixture
def reads() -> ReadTools:
    return ReadTools()


@pytest.fixture
async def reading(database_url: str, tmp_path: Path, reads: ReadTools) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, reads.all()) as reading:
        yield reading


def kinds(entries: Iterable[audit_pb2.AuditEntry]) -> list[str]:
    return [entry[0] for entry in fields_of(list(entries))]


def at_rest(reading: Registry) -> Any:
    return until(lambda: reading.executor.running_count == 0)


async def test_read_result_is_returned_with_its_check_and_recorded(reading: Registry, reads: ReadTools) -> None:
    (unasked,) = await checked(reading, ("z", "look", {}), reads=False)
    assert (unasked.HasField("result"), reads.ran["look"]) == (False, 0), "nothing runs without the option"
    one, two, wrong = await checked(reading, ("a", "look", {"n": 1}), ("b", "look", {"n": 2}), ("c", "look", b"x"))
    for number, verdict in enumerate((one, two), 1):
        assert verdict.disposition == execution_pb2.DISPOSITION_RUN
        # On a busy machine the wait may be too short, and the result is kept for the execution.
        result = verdict.result
        if not verdict.HasField("result"):
            result = await reading.run("look", {"n": number}, call=verdict.call_id)
        assert (outcome(result), content(result)) == ("SUCCEEDED", number)
    assert (wrong.error_reason, wrong.HasField("result"), reads.ran["look"]) == ("INVALID_JSON", False, 2)
    by_call = {call: kinds(await listed(reading, call_id=call)) for call in "abc"}
    assert by_call == {"a": ["PROPOSED", "EXECUTED", "RETURNED"], "b": by_call["a"], "c": ["PROPOSED"]}
    assert outcome((await until_read(reading, "f", "fail")).result) == "FAILED TOOL_ERROR"


async def test_calls_with_effects_questions_or_quotas_are_not_run_early(reading: Registry, reads: ReadTools) -> None:
    """No other call of their batch runs early either, because the run decides the order.

    Calls allowed by a rule also wait.
    """
    for name in ("note", "private", "counted", "locked"):
        verdicts = await checked(reading, (f"a_{name}", "look", {}), (f"b_{name}", name, {}))
        assert not any(verdict.HasField("result") for verdict in verdicts), name
    await make(reading, ALLOW, tool_name="private")
    (verdict,) = await checked(reading, ("ruled", "private", {}))
    assert (verdict.disposition, verdict.HasField("result")) == (execution_pb2.DISPOSITION_RUN, False)
    assert verdict.rule_id
    assert not reads.ran


async def test_cached_or_large_result_is_not_returned_with_the_check(reading: Registry, reads: ReadTools) -> None:
    assert len(content(await reading.run("large_kept", call="a"))) == 300_000
    (verdict,) = await checked(reading, ("b", "large_kept", {}))
    assert not verdict.HasField("result")
    assert "cache" in (await reading.run("large_kept", call="b")).result.note
    assert reads.ran["large_kept"] == 1


async def test_slow_read_runs_once_and_its_result_is_kept_for_execute(reading: Registry, reads: ReadTools) -> None:
    for call in "ab":
        (verdict,) = await checked(reading, (call, "slow", {}))
        assert not verdict.HasField("result")
    assert kinds(await listed(reading)) == ["PROPOSED", "PROPOSED"]
    attached = asyncio.ensure_future(reading.run("slow", call="a"))
    reads.release.set()
    assert content(await attached) == "found"
    await at_rest(reading)
    # The other call has ended but was not executed.
    assert (content(await reading.run("slow", call="b")), reads.ran["slow"]) == ("found", 2)
    assert Counter(kinds(await listed(reading))) == {"PROPOSED": 2, "EXECUTED": 2, "RETURNED": 2}


async def test_negative_timeout_is_rejected(reading: Registry) -> None:
    reads = execution_pb2.ExecuteReads(timeout_seconds=-1, timeout_seconds_max=10)
    assert await refusal(reading.verdicts(execute_reads=reads)) == "INVALID_FIELD"


async def test_read_that_asks_a_question_is_requested_again(reading: Registry) -> None:
    answer = execution_pb2.Answer(question="Which?", answer="this")
    (verdict,) = await checked(reading, ("a", "asking", {}))
    assert not verdict.HasField("result")
    assert outcome(await reading.run("asking", call="a")).startswith("INPUT_REQUIRED")
    assert content(await reading.run("asking", call="a", answers=[answer])) == "this"
    # The question of the other call came from another process.
    await checked(reading, ("b", "asking", {}))
    assert content(await reading.run("asking", call="b", answers=[answer])) == "this"


async def test_a_read_that_is_checked_but_never_executed_ends(
    reading: Registry, reads: ReadTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checked read is never executed if its run was cancelled or its caller has disconnected."""
    monkeypatch.setattr(executor, "KEPT_SECONDS", 0.2)
    await checked(reading, ("a", "slow", {}))
    await at_rest(reading)
    assert kinds(await listed(reading)) == ["PROPOSED", "EXECUTED", "RETURNED"]
    asked = asyncio.ensure_future(checked(reading, ("b", "slow", {})))
    await until(lambda: reads.ran["slow"] == 2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await at_rest(reading)
    reads.release.set()
    assert (content(await reading.run("slow", call="a")), reads.ran["slow"]) == ("found", 3)
