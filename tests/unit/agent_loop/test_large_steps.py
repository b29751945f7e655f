"""However much waits in an inbox, and whatever a run must end with: no step is larger than the ledger takes."""

from __future__ import annotations

from pawl.agent_loop.app.drive import Drive
from pawl.agent_loop.domain.call import CallResult, CallState
from pawl.agent_loop.domain.command import Cancel, Steer, ToolResult
from pawl.agent_loop.domain.run import FailureClass, RunFailure, RunState, StopCause
from pawl.chassis.ids import RunKey
from pawl.job.v1.ledger_pb2 import CommitRunRequest
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.unit.agent_loop.scenario import VERDICTS

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
