"""Background runs give way to foreground runs."""

from __future__ import annotations

import asyncio
import math
from unittest.mock import AsyncMock

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.workflow_pb2 import StartWorkflowRequest
from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.loop.background_steps import QUIET_SECONDS, YIELD_SECONDS_MAX, BackgroundSteps, yield_seconds
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.agent_loop.workflows.starting import WorkflowStarting
from pawl.agent_loop.workflows.versions import Workflows
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RequestId, StoreId, UserId
from pawl.errors import WorkflowNotFound
from tests.fakes.loop_world import World
from tests.fakes.model import says

CALLER = Principal(store_id=StoreId("s"), user_id=UserId("u"))


@pytest.mark.parametrize(
    ("since", "foreground_at", "wanted"),
    [
        (9.0, -math.inf, 0.0),
        (10.0, 10.0, QUIET_SECONDS),
        (10.0, 10.0 - QUIET_SECONDS, 0.0),
        (10.0 - YIELD_SECONDS_MAX, 10.0, 0.0),
        (10.01 - YIELD_SECONDS_MAX, 10.0, 0.01),
    ],
)
def test_background_work_waits_until_the_foreground_is_quiet_or_it_has_waited_long_enough(
    since: float, foreground_at: float, wanted: float
) -> None:
    assert yield_seconds(10.0, since=since, foreground_at=foreground_at) == pytest.approx(wanted)


async def _entered(steps: BackgroundSteps, number: int, seconds: float) -> int:
    """Let `number` steps ask for slots and never end. Return how many have one after `seconds`."""
    entered = list[int]()

    async def step(which: int) -> None:
        async with steps.held():
            entered.append(which)
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(step(which)) for which in range(number)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return len(entered)


async def test_only_a_few_background_runs_step_at_the_same_time_but_stuck_steps_do_not_count() -> None:
    assert await _entered(BackgroundSteps(), 6, 1.9) == 4
    assert await _entered(BackgroundSteps(), 6, 2.1) == 6


async def test_a_background_step_starts_after_a_pause_of_the_foreground_or_a_limited_wait() -> None:
    steps = BackgroundSteps()
    async with steps.foreground():
        assert await _entered(steps, 6, YIELD_SECONDS_MAX * 0.9) == 0
        assert await _entered(steps, 6, YIELD_SECONDS_MAX * 1.1) == 4
    assert await _entered(steps, 6, QUIET_SECONDS * 0.9) == 0
    assert await _entered(steps, 6, QUIET_SECONDS * 0.2) == 4, "cancelled steps have released their slots"


async def test_the_foreground_is_at_work_for_a_limited_time_in_each_step() -> None:
    steps, loop = BackgroundSteps(), asyncio.get_running_loop()

    async def waits(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return steps.yield_seconds(loop.time())

    async with steps.foreground():
        assert await waits(0.2) == pytest.approx(QUIET_SECONDS)
        async with steps.foreground():
            assert await waits(0.2) == pytest.approx(QUIET_SECONDS), "the second step is at work"
            assert await waits(0.1) == 0
    assert await waits(0) == 0, "the end of a stuck step does not count"
    async with steps.foreground():
        assert await waits(0) == pytest.approx(QUIET_SECONDS, abs=1e-4)
    assert await waits(0) == pytest.approx(QUIET_SECONDS, abs=1e-4)


async def test_the_start_of_a_workflow_gives_way_for_a_limited_time() -> None:
    steps, workflows = BackgroundSteps(), AsyncMock(spec=Workflows)
    workflows.of_run.side_effect = WorkflowNotFound
    ledger = PublicLedger(World({}, []).ledger.channel, background_steps=steps)
    starting = WorkflowStarting(ledger, workflows, AsyncMock(spec=RegistryClient), RunDefaults(model="model"))
    began = asyncio.get_running_loop().time()
    async with steps.foreground():
        with pytest.raises(WorkflowNotFound):
            await starting.start(CALLER, StartWorkflowRequest(name="w", request_id="r"))
    assert asyncio.get_running_loop().time() - began >= YIELD_SECONDS_MAX


async def test_the_foreground_is_at_work_while_a_message_is_accepted_and_during_each_step_of_its_run() -> None:
    world, waits = World({}, [says("Hello.")]), dict[str, list[float]]()
    steps = world.dependencies.background_steps
    agents = AsyncMock(spec=Agents)
    agents.of_run.return_value = None
    messages = Messages(
        ledger=PublicLedger(world.ledger.channel, background_steps=steps),
        defaults=RunDefaults(model="model"),
        agents=agents,
        registry=AsyncMock(spec=RegistryClient),
        takes_images=False,
    )

    async def note(name: str, _done: bool) -> None:
        waits.setdefault(name, []).append(steps.yield_seconds(asyncio.get_running_loop().time()))

    world.ledger.fault = note
    run = await messages.start(CALLER, RequestId("r"), agent_pb2.StartRunRequest(text="hello"))
    again = agent_pb2.SendMessageRequest(text="hello", conversation_id=run.conversation_id)
    await messages.send(CALLER, RequestId("r2"), again)
    await asyncio.sleep(1)
    await world.drive()
    assert waits["SubmitMessage"] == pytest.approx([QUIET_SECONDS] * 4)
    assert waits["CommitRun"] == pytest.approx([QUIET_SECONDS] * len(waits["CommitRun"]))
