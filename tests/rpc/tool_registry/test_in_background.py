"""The time of calls in the background, in every kind of tool (ASYNC-2)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.domain.definition import ASYNC_TIMEOUT_SECONDS_MAX
from pawl.tools import Category, EffectClass, Tool, ToolContext, tool
from pawl.worker import CallContext, Worker
from tests.rpc.tool_registry import process_tools
from tests.rpc.tool_registry.mcp_world import SAFE, FakeServer, mcp_registry, policy
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, running
from tests.rpc.tool_registry.test_worker_library import KEY, OPTIONS, working

HOUR = 3600.0


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=60, async_timeout_seconds=2 * HOUR)
async def look(context: ToolContext) -> float:
    """Say how long this may take."""
    return context.deadline.timestamp() - time.time()


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, timeout_seconds=60)
async def look_again(context: ToolContext) -> float:
    """Say how long this may take."""
    return context.deadline.timestamp() - time.time()


@tool(category=Category.SAFE, background=False)
async def stay() -> None:
    """Be waited for."""


def of_job() -> execution_pb2.CallContext:
    made = context()
    made.in_background = True
    return made


async def left(registry: Registry, name: str, seconds: float, *, of: execution_pb2.CallContext) -> float:
    call = f"{name}_{of.in_background}_{seconds:g}"
    return float(content(await registry.run(name, call=call, who=of, timeout_seconds=seconds)))


async def test_a_call_has_the_time_of_its_tool_in_the_background_where_its_run_is_a_job(
    database_url: str, tmp_path: Path
) -> None:
    """It may have a day. The short timeout of the tool is for those who wait for it."""
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
            """Say how long this may take."""
            return context.deadline.timestamp() - time.time()

        async with working(worker, registry, "charge"):
            assert HOUR < await left(registry, "charge", ASYNC_TIMEOUT_SECONDS_MAX, of=of_job()) <= 2 * HOUR
            assert await left(registry, "charge", ASYNC_TIMEOUT_SECONDS_MAX, of=context()) <= 60


async def test_a_verdict_says_what_a_tool_says_of_the_background(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, [look, look_again, stay]) as registry:
        verdicts = {name: await registry.check(name, {}) for name in ("look", "look_again", "stay")}
        said = {
            name: (verdict.timeout_seconds, verdict.async_timeout_seconds, verdict.without_background)
            for name, verdict in verdicts.items()
        }
        assert said == {"look": (60, 2 * HOUR, False), "look_again": (60, 0, False), "stay": (0, 0, True)}
        proposed = execution_pb2.ProposedCall(call_id="c", tool_name="look", tool_version=1)
        request = execution_pb2.CheckCallsRequest(
            context=of_job(),
            calls=[proposed],
            execute_reads=execution_pb2.ExecuteReads(timeout_seconds=7000, timeout_seconds_max=7000),
        )
        (verdict,) = (await registry.execution.CheckCalls(request)).verdicts
        assert verdict.timeout_seconds == 2 * HOUR
        assert HOUR < float(content(verdict.result)) <= 7000, "a read that runs with its check has that time, too"


@tool(category=Category.SAFE, reports={"every": 10})
async def count() -> None:
    """Count."""


async def test_a_verdict_says_what_is_told_of_the_jobs_of_a_tool(database_url: str, tmp_path: Path) -> None:
    """ASYNC-5: of a function, and of a worker's; it is part of the version."""
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


async def test_a_call_of_an_mcp_server_has_its_time_and_reports(database_url: str, tmp_path: Path) -> None:
    """ASYNC-5: a server itself says nothing of reports; a policy of its source does."""
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
