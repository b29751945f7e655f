"""What waits for people, listed and streamed: to whom, in parts, with signs of life (HITL-6, D7)."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.app.pending import Pending, PendingPart
from pawl.agent_loop.app.public_values import CallView, Page, PageAsked, PendingFilter, RunView
from pawl.agent_loop.domain.run import RunState
from pawl.agent_loop.rpc.servicer import AgentServicer
from pawl.chassis.auth import Principal
from pawl.chassis.clock import SystemClock
from pawl.chassis.ids import StoreId, UserId
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.conftest import ADMIN, ME
from tests.rpc.agent_loop.ledger import PlayedLedger, waiting_call

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
OF_STORE = agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE)


@pytest.fixture(autouse=True)
def pending(servicer: AgentServicer, ledger: PlayedLedger) -> None:
    """Let time pass while the list is watched."""
    servicer._pending = Pending(ledger=ledger, clock=SystemClock(), poll_seconds=0.02)


async def test_an_admin_sees_what_awaits_an_approval_of_all_users(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    await ledger.add_call("call_1", AWAITING)
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    listed = await stub.ListPending(agent_pb2.ListPendingRequest(filter=OF_STORE), metadata=ADMIN)
    assert [call.call_id for call in listed.calls] == ["call_1"]


async def test_a_stream_is_complete_when_it_says_so_and_shows_life(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """An empty response is a life sign; nothing is told twice."""
    await ledger.add_run()
    names = [f"call_{number:02}" for number in range(11)]
    for name in names:
        await ledger.add_call(name, AWAITING)
    async with asyncio.timeout(60):
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


async def test_a_run_that_waits_for_tokens_is_in_the_inbox_until_it_goes_on(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    await ledger.change("run_1", RunState.WAITING, waits=(run_pb2.WAIT_KIND_BUDGET,), token_budget=100)
    listed = await stub.ListPending(agent_pb2.ListPendingRequest(), metadata=ME)
    assert [(run.run_id, run.token_budget) for run in listed.runs] == [("run_1", 100)]
    of_store = await stub.ListPending(agent_pb2.ListPendingRequest(filter=OF_STORE), metadata=ADMIN)
    assert [run.run_id for run in of_store.runs] == ["run_1"]
    async with asyncio.timeout(60):
        stream: Any = stub.WatchPending(agent_pb2.WatchPendingRequest(), metadata=ME)
        assert [run.run_id for run in (await stream.read()).runs] == ["run_1"]
        ledger.put_run("run_1", token_budget=150)
        while not (response := await stream.read()).runs:
            assert not response.gone_run_ids
        assert response.runs[0].token_budget == 150
        await ledger.change("run_1", RunState.RUNNING, waits=())
        while not (response := await stream.read()).gone_run_ids:
            assert not response.runs
        assert (list(response.gone_run_ids), list(response.gone_call_ids)) == (["run_1"], [])
        stream.cancel()


class LargeInbox(PlayedLedger):
    """Pages of four calls."""

    pages = 2

    def __init__(self) -> None: ...

    async def list_pending(self, caller: Principal, wanted: PendingFilter, page: PageAsked) -> Page[CallView | RunView]:
        number = int(page.page_token or 0)
        calls = [waiting_call(f"call_{number}_{index}", b"") for index in range(4)]
        return Page(items=tuple(calls), next_page_token=str(number + 1) if number + 1 < self.pages else "")


async def test_a_sign_of_life_says_whether_more_waits_now_than_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes and goes beyond the calls that are told is no news of its own."""
    monkeypatch.setattr("pawl.agent_loop.app.pending.ITEMS_MAX", 4)
    ledger = LargeInbox()
    watching = Pending(ledger=ledger, clock=SystemClock(), poll_seconds=0.001).watch(
        Principal(store_id=StoreId("local"), user_id=UserId("me")), PendingFilter(), silence_seconds=0
    )
    async with asyncio.timeout(60), aclosing(watching):
        part = await anext(watching)
        assert (len(part.items), part.complete, part.truncated) == (4, True, True)
        for ledger.pages in (1, 2):
            assert await anext(watching) == PendingPart(truncated=ledger.pages == 2)
