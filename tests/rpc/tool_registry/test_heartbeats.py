"""Heartbeat timeouts, after which a call counts as lost (I5), and timeouts of background calls (ASYNC-2)."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1 import execution_pb2
from pawl.tools import (
    Category,
    EffectClass,
    Tool,
    ToolContext,
    cannot_say,
    tool,
)
from pawl.tools.rules.definition import ASYNC_TIMEOUT_SECONDS_MAX
from pawl.worker import CallContext, Worker
from tests.rpc.refusals import raises
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.mcp_world import SAFE, FakeServer, mcp_registry, policy
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, proposed, refusal, running
from tests.rpc.tool_registry.test_worker_library import KEY, OPTIONS, working


def silent(effect: EffectClass) -> Tool[..., Any]:
    async def reconcile(_context: ToolContext) -> Any:
        return cannot_say()

    is_reconcilable = effect is EffectClass.RECONCILABLE

    @tool(
        name="work",
        category=Category.SAFE,
        effect=effect,
        timeout_seconds=60,
        heartbeat_seconds=0.6,
        reconcile=reconcile if is_reconcilable else None,
    )
    async def work(context: ToolContext) -> Any:
        """Hang the first time."""
        if context.attempt == 1:
            await context.checkpoint("half")
            await asyncio.Event().wait()
        return context.last_checkpoint

    return work


@pytest.mark.parametrize("effect", [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT])
async def test_silent_repeatable_call_is_requested_again(
    database_url: str, tmp_path: Path, effect: EffectClass
) -> None:
    async with running(database_url, tmp_path, [silent(effect)]) as registry:
        await raises(DependencyUnavailable, registry.run("work"))
        assert content(await registry.run("work", earlier_attempts=1)) == "half"


class StuckFunction:
    """A function in a thread that ignores cancellation until the test releases it."""

    def __init__(self, effect: EffectClass) -> None:
        self.started: list[int] = []
        self.let_go = threading.Event()

        @tool(
            name="work",
            category=Category.SAFE,
            effect=effect,
            timeout_seconds=600,
            heartbeat_seconds=0.3,
        )
        def work(context: ToolContext) -> int:
            """Hang until released."""
            self.started.append(context.attempt)
            self.let_go.wait()
            return context.attempt

        self.tool = work

    async def get_stuck(self, registry: Registry) -> None:
        await raises(DependencyUnavailable, registry.run("work"))
        assert self.started == [1]


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def glance() -> str:
    """Look."""
    return "seen"


async def test_stuck_function_blocks_a_second_attempt(database_url: str, tmp_path: Path) -> None:
    """The function's thread cannot be stopped, so repeated attempts would use up all threads of the registry."""
    stuck = StuckFunction(EffectClass.IDEMPOTENT)
    async with running(database_url, tmp_path, [stuck.tool, glance], threads_max=2) as registry:
        try:
            await stuck.get_stuck(registry)
            for number in range(1, 4):
                late = await registry.run("work", earlier_attempts=number, timeout_seconds=0.1)
                assert outcome(late) == "FAILED TOOL_TIMEOUT"
            assert (stuck.started, content(await registry.run("glance", call="other"))) == ([1], "seen")
            again = asyncio.ensure_future(registry.run("work", earlier_attempts=4))
        finally:
            stuck.let_go.set()
        assert content(await again) == 5
    assert stuck.started == [1, 5]


@pytest.mark.parametrize("effect", [EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE])
async def test_lost_at_most_once_call_has_an_unknown_outcome(
    database_url: str, tmp_path: Path, effect: EffectClass
) -> None:
    async with running(database_url, tmp_path, [silent(effect)]) as registry:
        if attempts := int(effect is EffectClass.RECONCILABLE):
            assert await refusal(registry.run("work")) == "DEPENDENCY_UNAVAILABLE"
        for _ in range(2):
            assert outcome(await registry.run("work", earlier_attempts=attempts)) == "UNKNOWN OUTCOME_UNKNOWN"


async def test_silent_tool_in_its_own_process_is_killed(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [process_tools.get_stuck]) as registry:
        await raises(DependencyUnavailable, registry.run("get_stuck"))
        assert registry.executor.running_count == 0


async def test_progress_and_open_questions_count_as_heartbeats(database_url: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"category": Category.SAFE, "timeout_seconds": 60, "heartbeat_seconds": 1.5}

    @tool(name="tell", effect=EffectClass.IDEMPOTENT, **options)
    def tell(context: ToolContext) -> str:
        """Report progress for longer than the heartbeat timeout."""
        for _ in range(30):
            context.progress(message="on it")
            context.wait_cancelled(0.06)
        return "told" if not context.cancelled else "lost"

    @tool(name="ask", **options)
    async def ask(context: ToolContext) -> str:
        """Ask."""
        return await context.ask("Go on?")

    async with running(database_url, tmp_path, [tell, ask]) as registry:
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED"
        assert content(await registry.run("tell", call="tells")) == "told"
        assert outcome(await registry.run("ask", call="asks")) == "INPUT_REQUIRED", "it is still waiting"


HOUR = 3600.0


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=60, async_timeout_seconds=2 * HOUR)
async def look(context: ToolContext) -> float:
    """Return the remaining time."""
    return context.deadline.timestamp() - time.time()


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=60)
async def look_again(context: ToolContext) -> float:
    """Return the remaining time."""
    return context.deadline.timestamp() - time.time()


@tool(category=Category.SAFE, background=False)
async def stay() -> None:
    """Wait for this call."""


def of_job() -> execution_pb2.CallContext:
    return context(in_background=True)


async def left(registry: Registry, name: str, seconds: float, *, of: execution_pb2.CallContext) -> float:
    call = f"{name}_{of.in_background}_{seconds:g}"
    return float(content(await registry.run(name, call=call, who=of, timeout_seconds=seconds)))


async def test_job_call_gets_the_background_timeout(database_url: str, tmp_path: Path) -> None:
    """A job may run for a day, but the tool's short timeout still applies to callers that wait."""
    tools: list[Tool[..., Any]] = [look, look_again, process_tools.seconds_left]
    async with running(database_url, tmp_path, tools, worker_options=OPTIONS) as registry:
        for name in ("look", "seconds_left"):
            assert HOUR < await left(registry, name, ASYNC_TIMEOUT_SECONDS_MAX, of=of_job()) <= 2 * HOUR
            assert await left(registry, name, ASYNC_TIMEOUT_SECONDS_MAX, of=context()) <= 60
            assert await left(registry, name, 20.0, of=of_job()) <= 20
        assert await left(registry, "look_again", ASYNC_TIMEOUT_SECONDS_MAX, of=of_job()) > 23 * HOUR

        worker = Worker(registry.address, name="billing", api_key=KEY)

        @worker.tool(category="SAFE", effect="IDEMPOTENT", timeout_seconds=60, async_timeout_seconds=2 * HOUR)
        def charge(context: CallContext) -> float:
            """Return the remaining time."""
            return context.deadline.timestamp() - time.time()

        async with working(worker, registry, "charge"):
            assert HOUR < await left(registry, "charge", ASYNC_TIMEOUT_SECONDS_MAX, of=of_job()) <= 2 * HOUR
            assert await left(registry, "charge", ASYNC_TIMEOUT_SECONDS_MAX, of=context()) <= 60


async def test_verdict_has_the_tools_background_settings(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [look, look_again, stay]) as registry:
        verdicts = {name: await registry.check(name, {}) for name in ("look", "look_again", "stay")}
        assert {
            name: (verdict.timeout_seconds, verdict.async_timeout_seconds, verdict.without_background)
            for name, verdict in verdicts.items()
        } == {"look": (60, 2 * HOUR, False), "look_again": (60, 0, False), "stay": (0, 0, True)}
        reads = execution_pb2.ExecuteReads(timeout_seconds=7000, timeout_seconds_max=7000)
        (verdict,) = await registry.verdicts(proposed("c", "look"), who=of_job(), execute_reads=reads)
        assert verdict.timeout_seconds == 2 * HOUR
        assert HOUR < float(content(verdict.result)) <= 7000, "a read that runs with its check has the same timeout"


@tool(category=Category.SAFE, reports={"every": 10})
async def count() -> None:
    """Count."""


async def test_verdict_has_the_tools_job_reports(database_url: str, tmp_path: Path) -> None:
    """ASYNC-5: functions and workers can declare job reports, which are part of the tool's version."""
    async with running(database_url, tmp_path, [look, count], worker_options=OPTIONS) as registry:
        verdict = await registry.check("count", {})
        assert verdict.reports == run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_EVERY, report_iterations=10)
        assert not (await registry.check("look", {})).HasField("reports")
        worker = Worker(registry.address, name="billing", api_key=KEY)

        @worker.tool(category="SAFE", effect="IDEMPOTENT", reports={"digest": 600})
        def charge() -> None:
            """Charge."""

        async with working(worker, registry, "charge"):
            assert (await registry.check("charge", {})).reports == DIGEST


DIGEST = run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_DIGEST, report_seconds=600)


async def test_mcp_call_has_its_timeout_and_job_reports(database_url: str, tmp_path: Path) -> None:
    """ASYNC-5: a policy of the source configures the reports, not the server."""
    server = FakeServer(tmp_path / "fake", ["echo", "progress"])
    read_only: dict[str, Any] = {"category": SAFE, "effect_class": call_pb2.EFFECT_CLASS_READ_ONLY}
    policies = [policy("progress", timeout_seconds=0.1, reports=DIGEST, **read_only)]
    async with mcp_registry(database_url, tmp_path) as mcp:
        await mcp.add(server.config(policies=policies))
        assert outcome(await mcp.run("fake.progress", call="waited")) == "FAILED TOOL_TIMEOUT"
        more: dict[str, Any] = {"who": of_job(), "timeout_seconds": 2 * HOUR}
        assert outcome(await mcp.run("fake.progress", call="job", **more)) == "SUCCEEDED"
        assert (await mcp.registry.check("fake.progress", {})).reports == DIGEST
        assert not (await mcp.registry.check("fake.echo", {})).HasField("reports")
