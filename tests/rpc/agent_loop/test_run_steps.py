"""ListSteps and WatchSteps over a growing log."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.agent.v1 import steps_pb2
from pawl.event.v1 import call_pb2, event_pb2
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


pytestmark = pytest.mark.usefixtures("run")


async def think(ledger: PlayedLedger, *pieces: str) -> None:
    for piece in pieces:
        await ledger.append_event(event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(round=1, reasoning=piece)))


async def listed(stub: AgentServiceAsyncStub, page_size: int = 0) -> list[steps_pb2.Step]:
    found: list[steps_pb2.Step] = []
    token = ""
    while True:
        request = steps_pb2.ListStepsRequest(run_id="run_1", page_size=page_size, page_token=token)
        page = await stub.ListSteps(request, metadata=ME)
        found += page.steps
        token = page.next_page_token
        if not token:
            return found


async def test_steps_are_listed_during_the_run_and_after(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await think(ledger, "First ", "I look.")
    [step] = await listed(stub)
    assert (step.content, step.status) == ("First I look.", steps_pb2.STEP_STATUS_ACTIVE)
    call = call_pb2.Call(call_id="call_1", round=1, state=call_pb2.CALL_STATE_SUCCEEDED)
    await ledger.append_event(event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=call)))
    await ledger.finish()

    for page_size in (0, 1, 2):
        assert [step.step_id for step in await listed(stub, page_size)] == ["1-reasoning", "call_1", "call_1-result"]


async def test_reasoning_is_streamed_live_and_resumes_after_a_reconnect(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await think(ledger, "First ")
    stream = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id="run_1"), metadata=ME)
    first = await stream.read()
    assert isinstance(first, steps_pb2.WatchStepsResponse)
    await think(ledger, "I look.")
    second = await changed(stream)
    stream.cancel()
    assert [change.step.content for change in (*first.changes, *second.changes)] == ["First ", "I look."]
    assert second.changes[0].appends

    await think(ledger, " Then")
    again = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id="run_1", after_seq=second.seq), metadata=ME)
    third = await changed(again)
    assert [(change.appends, change.step.content) for change in third.changes] == [(True, " Then")]
    await ledger.finish()
    last = await changed(again)
    assert [change.step.status for change in last.changes] == [steps_pb2.STEP_STATUS_STOPPED]
    assert await again.read() is grpc.aio.EOF


async def changed(stream: object) -> steps_pb2.WatchStepsResponse:
    """Return the next response that contains changes."""
    async with asyncio.timeout(60):
        while True:
            response = await stream.read()  # type: ignore[attr-defined]
            assert isinstance(response, steps_pb2.WatchStepsResponse)
            if response.changes:
                return response
