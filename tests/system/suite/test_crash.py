"""kill -9 of processes in the middle of their work, and the guarantees afterwards. Scenes share one kill."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path

import pytest

from pawl.client import AsyncClient
from pawl.launcher.suite import Suite
from tests import servers
from tests.system.suite import scenes
from tests.system.suite.client import Agent, kill

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def survive(disaster: Callable[[], Awaitable[None]], *played: scenes.Scene) -> None:
    async with AsyncExitStack() as stack:
        for scene in played:
            await stack.enter_async_context(aclosing(scene))
            await anext(scene)
        await disaster()
        for scene in played:
            try:
                assert await anext(scene, "end") == "end"
            except AssertionError as error:
                raise AssertionError(f"{getattr(scene, '__name__', scene)}: {error}") from error


async def test_another_agent_loop_finishes_a_killed_ones_runs(
    suite: Suite, agent: Agent, pawl: AsyncClient, tmp_path: Path
) -> None:
    """OPS-5: both replicas are killed while they drive runs."""
    await survive(
        partial(kill, suite, "agent-loop"),
        scenes.a_tool_is_not_repeated(agent, tmp_path / "once"),
        scenes.stream_is_complete_without_repeats(agent, pawl),
    )


async def test_runs_continue_after_postgres_restart_and_killed_job_store(suite: Suite, agent: Agent) -> None:
    """OPS-4, OPS-5: a stream continues after both faults."""

    async def one_killed() -> None:
        suite.kill("job-store", 1)

    await survive(partial(servers.restart, suite, "postgres"), scenes.stream_continues(agent))
    await survive(one_killed, scenes.stream_continues(agent))
    await suite.wait_ready("job-store", 1)


async def test_killing_everything_loses_no_acknowledged_data(suite: Suite, agent: Agent) -> None:
    """OPS-5, I1, I3: all replicas of all services are killed."""
    everything = ("job-store", "tool-registry", "notifier", "agent-loop", "gateway")
    await survive(
        partial(kill, suite, *everything),
        scenes.stream_continues(agent),
        scenes.acknowledged_starts_are_kept(agent),
    )
