"""What comes with a claim, who begins with it, and when a worker claims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from pawl.agent_loop.loop.drive import Drive
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules.call import CallResult
from pawl.agent_loop.loop.rules.fact import Cancel, OutputDelta, RoundStarted, Steer, ToolResult
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.agent_loop.loop.rules.tool import ExecutionPiece
from pawl.chassis.ids import RunKey
from pawl.errors import DependencyUnavailable, InboxChanged, Internal, Overloaded, PawlError
from pawl.job.v1.ledger_pb2 import CommitRunRequest
from pawl.values import CallState, Execution, RunState, StopCause
from tests.fakes import virtual_time
from tests.fakes.ledger import logged_states
from tests.fakes.loop_world import World
from tests.fakes.model import Script, calls, says
from tests.unit.agent_loop.scenario import VERDICTS

# How often a call was begun, as the registry is told.


@pytest.mark.parametrize(("error", "earlier"), [(DependencyUnavailable, 1), (Internal, 1), (Overloaded, 0)])
async def test_an_execution_that_was_lost_counts_and_one_that_was_refused_does_not(
    error: type[PawlError], earlier: int
) -> None:
    """The tool is told; the registry knows what it may have begun before."""

    world = World(VERDICTS, [calls("look")])
    registry, lost = world.registry, list[Execution]()
    perform = registry.execute

    async def execute(context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        if not lost:
            lost.append(execution)
            raise error
        async for piece in perform(context, execution):
            yield piece

    registry.execute = execute  # type: ignore[method-assign]
    key = world.ledger.submit("hello")
    await world.finish(key)
    assert [execution.earlier_attempts for execution in (*lost, *registry.asked)] == [0, earlier]


# However much waits in an inbox, and whatever a run must end with: no step is larger than the ledger takes.


LARGEST = 1024 * 1024
CALLS = 20
# What one step takes of such things, with some room for the last one and for names.
BYTES_MAX = 4 * LARGEST


async def waiting(arguments_bytes: int = 10) -> tuple[World, RunKey]:
    """A parked run of which twenty calls are offered to a front end."""
    asked = [f'show {{"n":{number},"text":"{"x" * arguments_bytes}"}}' for number in range(CALLS)]
    world = World(VERDICTS, [calls(*asked), says("Done.")])
    key = world.ledger.submit("hello")
    await world.drive()
    world.ledger.steps.clear()
    return world, key


async def bring_everything(world: World, key: RunKey) -> None:
    """Results as large as they may be for all calls, and messages."""
    content = b'"%s"' % (b"x" * (LARGEST - 2))
    for call in world.ledger.calls(key):
        await world.ledger.send(key, ToolResult(call_id=call.call_id, result=CallResult(content_json=content)))
    for _ in range(3):
        await world.ledger.send(key, Steer(text="y" * (LARGEST // 4)))


def size(step: CommitRunRequest) -> int:
    results = sum(len(call.result.content_json) for call in step.calls)
    arguments = sum(len(call.arguments_json) for call in step.calls)
    return results + arguments + sum(len(message.text) for message in step.messages) + len(step.loop_state)


async def test_a_large_inbox_goes_into_several_steps() -> None:
    world, key = await waiting()
    await bring_everything(world, key)

    await world.drive()

    assert max(map(size, world.ledger.steps)) <= BYTES_MAX
    assert world.ledger.run(key).state is RunState.COMPLETED
    assert {call.state for call in world.ledger.calls(key)} == {CallState.SUCCEEDED}
    assert [len(message.text) for message in world.ledger.messages(key)][-4:-1] == [LARGEST // 4] * 3


async def test_a_run_with_many_large_calls_is_ended_in_several_steps() -> None:
    for failure in (None, RunFailure(failure_class=FailureClass.INTERNAL, reason="INTERNAL", message="broken")):
        world, key = await waiting(arguments_bytes=250 * 1024)
        if failure is None:
            await world.ledger.send(key, Cancel(cause=StopCause.USER))
        else:
            some = world.ledger.calls(key)[0]
            await world.ledger.send(key, ToolResult(call_id=some.call_id, result=CallResult(content_json=b"1")))
        await Drive(await world.claim(), world.dependencies, failure=failure).run()

        assert max(map(size, world.ledger.steps)) <= BYTES_MAX
        assert world.ledger.run(key).state is (RunState.FAILED if failure else RunState.CANCELLED)


# A model call may begin while the step that announces it is being written; nothing of it is used before.


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
        assert logged_states(world.ledger.log(key))[-1] == "COMPLETED"

    played([calls("look"), says("forgotten"), says("It rains.")], check, at_step=2, hook=hook)
