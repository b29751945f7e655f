"""What waits for people, listed and streamed: to whom, in parts, with signs of life (HITL-6, D7)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.app.pending import Pending
from pawl.agent_loop.domain.run import RunState
from pawl.agent_loop.rpc.servicer import AgentServicer
from pawl.chassis.clock import SystemClock
from pawl.event.v1 import call_pb2, run_pb2
from tests.fakes.public_ledger import FakeLedger
from tests.rpc.agent_loop.conftest import ADMIN, ME
from tests.rpc.agent_loop.errors import reason

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
OF_STORE = agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE)


@pytest.fixture(autouse=True)
def pending(servicer: AgentServicer, ledger: FakeLedger) -> None:
    """Let time pass while the list is watched."""
    servicer._pending = Pending(ledger=ledger, clock=SystemClock(), poll_seconds=0.02)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (OF_STORE, "PERMISSION_DENIED"),
        (agent_pb2.PendingFilter(scope=7), "INVALID_FIELD"),  # type: ignore[arg-type]  # of a later version
        (agent_pb2.PendingFilter(states=[99]), "INVALID_FIELD"),  # type: ignore[list-item]  # of a later version
        (agent_pb2.PendingFilter(conversation_id="a b"), "INVALID_ID"),
        (agent_pb2.PendingFilter(tool_name="x" * 257), "INVALID_FIELD"),
        (agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE, conversation_id="conv_1"), "INVALID_FIELD"),
    ],
)
async def test_who_may_not_ask_or_asks_for_nothing_that_there_is_is_refused(
    stub: AgentServiceAsyncStub, wanted: agent_pb2.PendingFilter, expected: str
) -> None:
    assert await reason(stub.ListPending(agent_pb2.ListPendingRequest(filter=wanted), metadata=ME)) == expected
    stream: Any = stub.WatchPending(agent_pb2.WatchPendingRequest(filter=wanted), metadata=ME)
    assert await reason(stream.read()) == expected


async def test_an_admin_sees_what_awaits_an_approval_of_all_users(
    stub: AgentServiceAsyncStub, ledger: FakeLedger
) -> None:
    await ledger.add_run()
    await ledger.add_call("call_1", AWAITING)
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    listed = await stub.ListPending(agent_pb2.ListPendingRequest(filter=OF_STORE), metadata=ADMIN)
    assert [call.call_id for call in listed.calls] == ["call_1"]


async def test_a_stream_is_complete_when_it_says_so_and_shows_life(
    stub: AgentServiceAsyncStub, ledger: FakeLedger
) -> None:
    """An empty response is a life sign; nothing is told twice."""
    await ledger.add_run()
    names = [f"call_{number:02}" for number in range(11)]
    for name in names:
        await ledger.add_call(name, AWAITING)
    async with asyncio.timeout(30):
        stream: Any = stub.WatchPending(agent_pb2.WatchPendingRequest(), metadata=ME)
        seen: list[str] = []
        complete = False
        while not complete:
            response = await stream.read()
            seen += [call.call_id for call in response.calls]
            complete = response.complete
        assert seen == names
        assert await stream.read() == agent_pb2.WatchPendingResponse()
        await ledger.settle(names[3])
        while not (response := await stream.read()).gone_call_ids:
            assert not response.calls
        assert list(response.gone_call_ids) == [names[3]]
        stream.cancel()


async def test_an_inbox_with_nothing_in_it_is_complete_at_once(stub: AgentServiceAsyncStub) -> None:
    async with asyncio.timeout(30):
        stream: Any = stub.WatchPending(agent_pb2.WatchPendingRequest(), metadata=ME)
        assert await stream.read() == agent_pb2.WatchPendingResponse(complete=True)
        stream.cancel()


async def test_a_run_that_waits_for_tokens_is_in_the_inbox_until_it_goes_on(
    stub: AgentServiceAsyncStub, ledger: FakeLedger
) -> None:
    stored = await ledger.add_run()
    stored.run.waits.append(run_pb2.WAIT_KIND_BUDGET)
    stored.run.token_budget = 100
    await ledger.change("run_1", RunState.WAITING)
    listed = await stub.ListPending(agent_pb2.ListPendingRequest(), metadata=ME)
    assert [(run.run_id, run.token_budget) for run in listed.runs] == [("run_1", 100)]
    of_store = await stub.ListPending(agent_pb2.ListPendingRequest(filter=OF_STORE), metadata=ADMIN)
    assert [run.run_id for run in of_store.runs] == ["run_1"]
    async with asyncio.timeout(30):
        stream: Any = stub.WatchPending(agent_pb2.WatchPendingRequest(), metadata=ME)
        assert [run.run_id for run in (await stream.read()).runs] == ["run_1"]
        stored.run.token_budget = 150
        while not (response := await stream.read()).runs:
            assert not response.gone_run_ids
        assert response.runs[0].token_budget == 150
        stored.run.ClearField("waits")
        await ledger.change("run_1", RunState.RUNNING)
        while not (response := await stream.read()).gone_run_ids:
            assert not response.runs
        assert (list(response.gone_run_ids), list(response.gone_call_ids)) == (["run_1"], [])
        stream.cancel()
