"""A model call may begin while the step that announces it is being written; nothing of it is used before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pawl.agent_loop.app.drive import Drive, Left
from pawl.agent_loop.domain.command import Cancel, Steer
from pawl.agent_loop.domain.event import OutputDelta, RoundStarted
from pawl.agent_loop.domain.run import RunState, StopCause
from pawl.chassis.ids import RunKey
from pawl.errors import InboxChanged
from tests.fakes import virtual_time
from tests.fakes.ledger import states_told
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import VERDICTS

_STEP_SECONDS = 5.0
"""So long each step takes to be written: much longer than the model takes."""

TOKENS_PER_ANSWER = 15

Hook = Callable[[World, RunKey], Coroutine[Any, Any, None]]


def played(scripts: list[Script], check: Hook, *, at_step: int, hook: Hook) -> None:
    """Play a run whose step `at_step` (from 1) takes long to reach the ledger; `hook` is called meanwhile."""

    async def main() -> None:
        world = World(VERDICTS, scripts, seconds=0.01)
        world.registry.reads_at_once = True
        key = world.ledger.submit("hello")
        steps = 0

        async def fault(method: str, done: bool) -> None:
            nonlocal steps
            if method != "CommitRun" or done:
                return
            steps += 1
            if steps == at_step:
                await asyncio.sleep(_STEP_SECONDS)
                await hook(world, key)

        world.ledger.fault = fault
        await world.finish(key)
        await check(world, key)

    virtual_time.run(main())


def shown(world: World, key: RunKey) -> str:
    return "".join(event.text for event in world.ledger.events(key) if isinstance(event, OutputDelta))


def test_its_calls_are_not_checked_before_it_is_durable() -> None:
    async def hook(world: World, key: RunKey) -> None:
        assert len(world.model.requests) == 1
        assert not world.registry.order

    async def check(world: World, key: RunKey) -> None:
        assert len(world.registry.order) == 1
        assert world.ledger.run(key).state is RunState.COMPLETED

    played([calls("look"), says("Done.")], check, at_step=1, hook=hook)


@pytest.mark.parametrize("at_step", [1, 2])
def test_a_cancel_that_comes_before_the_step_leaves_nothing_of_it(at_step: int) -> None:
    async def hook(world: World, key: RunKey) -> None:
        assert len(world.model.requests) == at_step
        await world.ledger.send(key, Cancel(cause=StopCause.USER))

    async def check(world: World, key: RunKey) -> None:
        assert world.ledger.run(key).state is RunState.CANCELLED
        rounds = [event for event in world.ledger.events(key) if isinstance(event, RoundStarted)]
        assert len(rounds) == at_step - 1
        assert "secret" not in shown(world, key)
        # It has cost what it has cost.
        assert world.ledger.run(key).usage.model_calls == at_step
        assert world.model.streaming == 0

    scripts: list[Script] = [calls("look"), says("secret")]
    played(scripts[-1:] if at_step == 1 else scripts, check, at_step=at_step, hook=hook)


def test_a_refused_step_is_planned_again_without_it_and_the_model_is_asked_anew() -> None:
    async def hook(world: World, key: RunKey) -> None:
        await world.ledger.send(key, Steer(text="And the weather?"))
        raise InboxChanged

    async def check(world: World, key: RunKey) -> None:
        assert world.ledger.run(key).state is RunState.COMPLETED
        # What was asked ahead, what was asked instead.
        assert len(world.model.requests) == 3
        assert any("weather" in str(message) for message in world.model.requests[-1].messages)
        assert "forgotten" not in shown(world, key)
        usage = world.ledger.run(key).usage
        assert (usage.model_calls, usage.total_tokens) == (3, 3 * TOKENS_PER_ANSWER)
        assert states_told(world.ledger.log(key))[-1] == "COMPLETED"

    played([calls("look"), says("forgotten"), says("It rains.")], check, at_step=2, hook=hook)


async def test_what_was_forgotten_just_before_the_run_is_handed_over_counts() -> None:
    world = World(VERDICTS, [[60.0, *says("lost")], says("forgotten")])
    key = world.ledger.submit("hello")
    lost = asyncio.ensure_future(world.drive())
    await asyncio.sleep(10.0)
    lost.cancel()
    await asyncio.wait([lost])
    drive = Drive(await world.claim(), world.dependencies)

    async def fault(method: str, done: bool) -> None:
        if method == "CommitRun" and not done:
            world.ledger.fault = None
            await asyncio.sleep(1.0)
            drive.hand_over()
            raise InboxChanged

    world.ledger.fault = fault
    assert await drive.run() is Left.HANDED_OVER
    assert len(world.model.requests) == 2
    assert world.ledger.run(key).usage.model_calls == 1
