"""Calls that only read may run as soon as they are checked; nobody sees more of it than of any other call."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.app.execution import executor
from pawl.tool_registry.domain.definition import EffectClass
from pawl.tools import Category, Tool, ToolContext, ToolError, tool
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, as_json, content, context, outcome, running
from tests.rpc.tool_registry.test_audit import listed, said
from tests.rpc.tool_registry.test_rules import ALLOW, make

SAFE, READ_ONLY = Category.SAFE, EffectClass.READ_ONLY


class Tools:
    """Tools that count how often they run; `slow` waits until `release` is set."""

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
            """Look for long."""
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

        @tool(category=SAFE, effect=READ_ONLY)
        def large() -> str:
            """Return much."""
            return "x" * 300_000

        @tool(category=SAFE, effect=READ_ONLY, cache_seconds=60)
        def large_kept() -> str:
            """Return much, once."""
            self.ran["large_kept"] += 1
            return "x" * 300_000

        @tool(category=SAFE, effect=READ_ONLY, rate_per_minute=5)
        def counted() -> int:
            """Look, seldom."""
            self.ran["counted"] += 1
            return 0

        @tool(category=SAFE, effect=READ_ONLY, cache_seconds=60)
        def kept() -> int:
            """Look once."""
            self.ran["kept"] += 1
            return 0

        @tool(category=SAFE, effect=READ_ONLY, resource_keys=["desk"])
        def locked() -> int:
            """Look when nobody else does."""
            self.ran["locked"] += 1
            return 0

        @tool(category=SAFE, effect=EffectClass.IDEMPOTENT)
        def note() -> str:
            """Write."""
            self.ran["note"] += 1
            return "written"

        @tool(category=Category.SENSITIVE, effect=READ_ONLY)
        def private() -> str:
            """Look at what is private."""
            self.ran["private"] += 1
            return "secret"

        return [look, slow, fail, asking, large, large_kept, counted, kept, locked, note, private]


async def checked(registry: Registry, *calls: tuple[str, str, Any], reads: bool = True) -> list[execution_pb2.Verdict]:
    """Check calls, each given as id, tool and arguments, and have them run if they only read."""
    request = execution_pb2.CheckCallsRequest(
        context=context(),
        calls=[
            execution_pb2.ProposedCall(call_id=call, tool_name=name, tool_version=1, arguments_json=as_json(arguments))
            for call, name, arguments in calls
        ],
        execute_reads=execution_pb2.ExecuteReads(timeout_seconds=10, timeout_seconds_max=100) if reads else None,
    )
    return list((await registry.execution.CheckCalls(request)).verdicts)


async def until_read(registry: Registry, call: str, name: str) -> execution_pb2.Verdict:
    """Check a call by ids that begin with `call` until a result comes along: on a busy machine a moment is short."""
    verdicts: list[execution_pb2.Verdict] = []

    async def has_result() -> bool:
        verdicts[:] = await checked(registry, (f"{call}{len(verdicts)}", name, {}))
        return verdicts[0].HasField("result")

    await until(has_result)
    return verdicts[0]


async def test_what_only_reads_is_there_with_its_check_and_written_down_with_it(
    database_url: str, tmp_path: Path
) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        one, two, wrong = await checked(registry, ("a", "look", {"n": 1}), ("b", "look", {"n": 2}), ("c", "look", b"x"))
        for number, verdict in enumerate((one, two), 1):
            assert verdict.disposition == execution_pb2.DISPOSITION_RUN
            # On a busy machine a moment is too short: then the result is kept for whoever executes the call.
            result = verdict.result
            if not verdict.HasField("result"):
                result = await registry.run("look", {"n": number}, call=verdict.call_id)
            assert (outcome(result), content(result)) == ("SUCCEEDED", number)
        assert wrong.error_reason == "INVALID_JSON"
        assert not wrong.HasField("result")
        assert tools.ran["look"] == 2
        by_call = {call: [entry[0] for entry in said(await listed(registry, call_id=call))] for call in "abc"}
        assert by_call == {"a": ["PROPOSED", "EXECUTED", "RETURNED"], "b": by_call["a"], "c": ["PROPOSED"]}


async def test_without_being_asked_for_nothing_runs(database_url: str, tmp_path: Path) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        (verdict,) = await checked(registry, ("a", "look", {}), reads=False)
        assert not verdict.HasField("result")
        assert not tools.ran


@pytest.mark.parametrize("name", ["note", "private", "counted", "locked"])
async def test_what_has_an_effect_needs_somebody_or_is_counted_does_not_run(
    database_url: str, tmp_path: Path, name: str
) -> None:
    """Nor does what it stands beside: the order of a batch is for its run to say."""
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        verdicts = await checked(registry, ("a", "look", {}), ("b", name, {}))
        assert not any(verdict.HasField("result") for verdict in verdicts)
        assert not tools.ran
        assert [entry[0] for entry in said(await listed(registry))] == ["PROPOSED", "PROPOSED"]


async def test_a_rule_that_decides_keeps_a_read_from_running_at_once(database_url: str, tmp_path: Path) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        await make(registry, ALLOW, tool_name="private")
        (verdict,) = await checked(registry, ("a", "private", {}))
        assert verdict.disposition == execution_pb2.DISPOSITION_RUN
        assert verdict.rule_id
        assert not verdict.HasField("result")
        assert not tools.ran


async def test_a_failure_is_a_result(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, Tools().all()) as registry:
        verdict = await until_read(registry, "f", "fail")
        assert outcome(verdict.result) == "FAILED TOOL_ERROR"


async def test_a_kept_result_is_given_again(database_url: str, tmp_path: Path) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        await until_read(registry, "a", "kept")
        ran = tools.ran["kept"]
        verdict = await until_read(registry, "b", "kept")
        assert tools.ran["kept"] == ran
        assert "cache" in verdict.result.result.note


async def test_what_takes_longer_runs_once_and_its_result_is_for_who_executes_it(
    database_url: str, tmp_path: Path
) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        (going_on,) = await checked(registry, ("a", "slow", {}))
        (going_on_too,) = await checked(registry, ("b", "slow", {}))
        assert not going_on.HasField("result")
        assert not going_on_too.HasField("result")
        assert [entry[0] for entry in said(await listed(registry))] == ["PROPOSED", "PROPOSED"]
        attached = asyncio.ensure_future(registry.run("slow", call="a"))
        tools.release.set()
        assert content(await attached) == "found"

        async def has_ended() -> bool:
            return registry.executor.running_count == 0

        await until(has_ended)
        # The other one has ended, and nobody had asked for it yet.
        assert content(await registry.run("slow", call="b")) == "found"
        assert tools.ran["slow"] == 2
        kinds = Counter(entry[0] for entry in said(await listed(registry)))
        assert kinds == {"PROPOSED": 2, "EXECUTED": 2, "RETURNED": 2}


async def test_what_asks_somebody_is_asked_for_again(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, Tools().all()) as registry:
        (verdict,) = await checked(registry, ("a", "asking", {}))
        assert not verdict.HasField("result")
        result = await registry.run("asking", call="a")
        assert outcome(result).startswith("INPUT_REQUIRED")
        answer = execution_pb2.Answer(question="Which?", answer="this")
        assert content(await registry.run("asking", call="a", answers=[answer])) == "this"
        # Of another one the question was put by another process.
        await checked(registry, ("b", "asking", {}))
        assert content(await registry.run("asking", call="b", answers=[answer])) == "this"


async def test_what_nobody_executes_after_its_check_ends(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run was cancelled meanwhile, and no run knows of it."""
    monkeypatch.setattr(executor, "KEPT_SECONDS", 0.2)
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        (verdict,) = await checked(registry, ("a", "slow", {}))
        assert not verdict.HasField("result")

        async def has_ended() -> bool:
            return registry.executor.running_count == 0

        await until(has_ended)
        kinds = [entry[0] for entry in said(await listed(registry))]
        assert kinds == ["PROPOSED", "EXECUTED", "RETURNED"]
        tools.release.set()
        assert content(await registry.run("slow", call="a")) == "found"
        assert tools.ran["slow"] == 2


async def test_a_large_result_does_not_come_with_the_check(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, Tools().all()) as registry:
        (verdict,) = await checked(registry, ("a", "large", {}))
        assert not verdict.HasField("result")
        assert len(content(await registry.run("large", call="a"))) == 300_000


async def test_nor_does_a_large_result_that_is_kept(database_url: str, tmp_path: Path) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        await registry.run("large_kept", call="a")
        (verdict,) = await checked(registry, ("b", "large_kept", {}))
        assert not verdict.HasField("result")
        result = await registry.run("large_kept", call="b")
        assert "cache" in result.result.note
        assert tools.ran["large_kept"] == 1


async def test_who_leaves_the_check_leaves_nothing_behind(database_url: str, tmp_path: Path) -> None:
    tools = Tools()
    async with running(database_url, tmp_path, tools.all()) as registry:
        asked = asyncio.ensure_future(checked(registry, ("a", "slow", {})))

        async def has_begun() -> bool:
            return tools.ran["slow"] == 1

        await until(has_begun)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        if asked.cancelled():

            async def has_ended() -> bool:
                return registry.executor.running_count == 0

            await until(has_ended)


async def test_timeouts_out_of_bounds_are_refused(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, Tools().all()) as registry:
        request = execution_pb2.CheckCallsRequest(
            context=context(), execute_reads=execution_pb2.ExecuteReads(timeout_seconds=-1, timeout_seconds_max=10)
        )
        with pytest.raises(Exception, match="timeouts: must be"):
            await registry.execution.CheckCalls(request)


async def test_a_run_may_give_more_time_than_any_tool_takes(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, Tools().all()) as registry:
        request = execution_pb2.CheckCallsRequest(
            context=context(),
            calls=[execution_pb2.ProposedCall(call_id="a", tool_name="look", tool_version=1, arguments_json=b"{}")],
            execute_reads=execution_pb2.ExecuteReads(timeout_seconds=10, timeout_seconds_max=100_000),
        )
        (verdict,) = (await registry.execution.CheckCalls(request)).verdicts
        assert verdict.disposition == execution_pb2.DISPOSITION_RUN
