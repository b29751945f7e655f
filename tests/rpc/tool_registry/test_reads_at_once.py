"""Read-only calls may run as soon as they are checked, and are recorded like all other calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2
from pawl.tool_registry.execution import executor
from pawl.tools import Category, Tool, ToolContext, ToolError, tool
from pawl.values import EffectClass
from tests.poll import until
from tests.rpc.tool_registry.registry import (
    Registry,
    content,
    outcome,
    proposed,
    refusal,
    running,
)
from tests.rpc.tool_registry.test_audit import fields_of, listed
from tests.rpc.tool_registry.test_rules import ALLOW, make

SAFE, READ_ONLY = Category.SAFE, EffectClass.READ_ONLY


class Tools:
    def __init__(self) -> None:
        self.ran = Counter[str]()
        self.release = asyncio.Event()

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


async def checked(registry: Registry, *calls: tuple[str, str, Any], reads: bool = True) -> list[execution_pb2.Verdict]:
    timeouts = execution_pb2.ExecuteReads(timeout_seconds=10, timeout_seconds_max=100) if reads else None
    return await registry.verdicts(*(proposed(*call) for call in calls), execute_reads=timeouts)


async def until_read(registry: Registry, call: str, name: str) -> execution_pb2.Verdict:
    """Check new calls, whose ids start with `call`, until a verdict includes a result.

    On a busy machine the read may take longer than the check.
    """
    verdicts: list[execution_pb2.Verdict] = []

    async def has_result() -> bool:
        verdicts[:] = await checked(registry, (f"{call}{len(verdicts)}", name, {}))
        return verdicts[0].HasField("result")

    await until(has_result)
    return verdicts[0]


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
async def registry(database_url: str, tmp_path: Path, tools: Tools) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools.all()) as registry:
        yield registry


def kinds(entries: Iterable[audit_pb2.AuditEntry]) -> list[str]:
    return [entry[0] for entry in fields_of(list(entries))]


def at_rest(registry: Registry) -> Any:
    return until(lambda: registry.executor.running_count == 0)


async def test_read_result_is_returned_with_its_check_and_recorded(registry: Registry, tools: Tools) -> None:
    (unasked,) = await checked(registry, ("z", "look", {}), reads=False)
    assert (unasked.HasField("result"), tools.ran["look"]) == (False, 0), "nothing runs without the option"
    one, two, wrong = await checked(registry, ("a", "look", {"n": 1}), ("b", "look", {"n": 2}), ("c", "look", b"x"))
    for number, verdict in enumerate((one, two), 1):
        assert verdict.disposition == execution_pb2.DISPOSITION_RUN
        # On a busy machine the wait may be too short, and the result is kept for the execution.
        result = verdict.result
        if not verdict.HasField("result"):
            result = await registry.run("look", {"n": number}, call=verdict.call_id)
        assert (outcome(result), content(result)) == ("SUCCEEDED", number)
    assert (wrong.error_reason, wrong.HasField("result"), tools.ran["look"]) == ("INVALID_JSON", False, 2)
    by_call = {call: kinds(await listed(registry, call_id=call)) for call in "abc"}
    assert by_call == {"a": ["PROPOSED", "EXECUTED", "RETURNED"], "b": by_call["a"], "c": ["PROPOSED"]}
    assert outcome((await until_read(registry, "f", "fail")).result) == "FAILED TOOL_ERROR"


async def test_calls_with_effects_questions_or_quotas_are_not_run_early(registry: Registry, tools: Tools) -> None:
    """No other call of their batch runs early either, because the run decides the order.

    Calls allowed by a rule also wait.
    """
    for name in ("note", "private", "counted", "locked"):
        verdicts = await checked(registry, (f"a_{name}", "look", {}), (f"b_{name}", name, {}))
        assert not any(verdict.HasField("result") for verdict in verdicts), name
    await make(registry, ALLOW, tool_name="private")
    (verdict,) = await checked(registry, ("ruled", "private", {}))
    assert (verdict.disposition, verdict.HasField("result")) == (execution_pb2.DISPOSITION_RUN, False)
    assert verdict.rule_id
    assert not tools.ran


async def test_cached_or_large_result_is_not_returned_with_the_check(registry: Registry, tools: Tools) -> None:
    assert len(content(await registry.run("large_kept", call="a"))) == 300_000
    (verdict,) = await checked(registry, ("b", "large_kept", {}))
    assert not verdict.HasField("result")
    assert "cache" in (await registry.run("large_kept", call="b")).result.note
    assert tools.ran["large_kept"] == 1


async def test_slow_read_runs_once_and_its_result_is_kept_for_execute(registry: Registry, tools: Tools) -> None:
    for call in "ab":
        (verdict,) = await checked(registry, (call, "slow", {}))
        assert not verdict.HasField("result")
    assert kinds(await listed(registry)) == ["PROPOSED", "PROPOSED"]
    attached = asyncio.ensure_future(registry.run("slow", call="a"))
    tools.release.set()
    assert content(await attached) == "found"
    await at_rest(registry)
    # The other call has ended but was not executed.
    assert content(await registry.run("slow", call="b")) == "found"
    assert tools.ran["slow"] == 2
    assert Counter(kinds(await listed(registry))) == {"PROPOSED": 2, "EXECUTED": 2, "RETURNED": 2}


async def test_negative_timeout_is_rejected(registry: Registry) -> None:
    reads = execution_pb2.ExecuteReads(timeout_seconds=-1, timeout_seconds_max=10)
    assert await refusal(registry.verdicts(execute_reads=reads)) == "INVALID_FIELD"


async def test_read_that_asks_a_question_is_requested_again(registry: Registry) -> None:
    answer = execution_pb2.Answer(question="Which?", answer="this")
    (verdict,) = await checked(registry, ("a", "asking", {}))
    assert not verdict.HasField("result")
    assert outcome(await registry.run("asking", call="a")).startswith("INPUT_REQUIRED")
    assert content(await registry.run("asking", call="a", answers=[answer])) == "this"
    # The question of the other call came from another process.
    await checked(registry, ("b", "asking", {}))
    assert content(await registry.run("asking", call="b", answers=[answer])) == "this"


async def test_a_read_that_is_checked_but_never_executed_ends(
    registry: Registry, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checked read is never executed if its run was cancelled or its caller has disconnected."""
    monkeypatch.setattr(executor, "KEPT_SECONDS", 0.2)
    await checked(registry, ("a", "slow", {}))
    await at_rest(registry)
    assert kinds(await listed(registry)) == ["PROPOSED", "EXECUTED", "RETURNED"]
    asked = asyncio.ensure_future(checked(registry, ("b", "slow", {})))
    await until(lambda: tools.ran["slow"] == 2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await at_rest(registry)
    tools.release.set()
    assert content(await registry.run("slow", call="a")) == "found"
    assert tools.ran["slow"] == 3
