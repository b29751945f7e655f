"""Pending items, listed and streamed: visibility, pages and heartbeats (HITL-6, D7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2 import WatchPendingResponse
from pawl.agent_loop.api.pending import FALLBACK_PAUSES, Pending
from pawl.agent_loop.api.rpc import AgentServicer
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.process.clock import SystemClock
from pawl.errors import PawlError, PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1.ledger_pb2 import ListPendingCallsRequest, ListPendingCallsResponse
from pawl.values import RunState
from tests.fakes.manual_clock import ManualClock
from tests.fakes.session_agent import FakeLive
from tests.rpc.agent_loop.conftest import ADMIN, ME
from tests.rpc.agent_loop.ledger import PlayedLedger, waiting_call
from tests.rpc.stubs import AgentServiceAsyncStub

AWAITING = call_pb2.CALL_STATE_AWAITING_APPROVAL
OF_STORE = agent_pb2.PendingFilter(scope=agent_pb2.PENDING_SCOPE_STORE)


@pytest.fixture
def time_passes(servicer: AgentServicer, ledger: PlayedLedger) -> None:
    servicer._pending = Pending(ledger=ledger, clock=SystemClock(), poll_seconds=0.02)


async def test_admin_sees_all_users_pending_approvals(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, time_passes: None
) -> None:
    await ledger.add_run()
    for call_id, state in (("call_1", AWAITING), ("call_2", call_pb2.CALL_STATE_ASKED)):
        await ledger.add_call(call_id, state)
    listed = await stub.ListPending(agent_pb2.ListPendingRequest(filter=OF_STORE), metadata=ADMIN)
    assert [call.call_id for call in listed.calls] == ["call_1"]


async def test_stream_reports_a_complete_snapshot_and_sends_heartbeats(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, time_passes: None
) -> None:
    """An empty response is a heartbeat, and no item is sent twice."""
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
        assert (seen, await stream.read()) == (names, WatchPendingResponse())
        await ledger.settle(names[3])
        while not (response := await stream.read()).gone_call_ids:
            assert not response.calls
        assert list(response.gone_call_ids) == [names[3]]
        stream.cancel()


async def test_run_waiting_for_tokens_is_in_the_inbox_until_it_resumes(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, time_passes: None
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


# Only watchers with the same view share polls for pending items.


CALLER = Principal(store_id=StoreId("local"), user_id=UserId("me"), roles=frozenset({"member"}))
ADMIN_CALLER = replace(CALLER, roles=frozenset({"member", "admin"}))
OTHER = replace(CALLER, user_id=UserId("you"))
MINE, STORE_WIDE = ListPendingCallsRequest(), ListPendingCallsRequest(of_all_users=True)


class Ledger(PlayedLedger):
    """Returns each user's calls in `waiting` while `gate` is set, and counts its requests."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[str]] = {"me": ["call_1"], "you": ["call_2"]}
        self.asked: Counter[tuple[str, bool]] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: PawlError | None = None
        self.now_reading = self.most_reading = 0

    async def list_pending(self, caller: Principal, request: ListPendingCallsRequest) -> ListPendingCallsResponse:
        self.asked[caller.user_id, request.of_all_users] += 1
        found = [waiting_call(name) for name in self.waiting.get(caller.user_id, ())]
        self.now_reading += 1
        self.most_reading = max(self.most_reading, self.now_reading)
        try:
            await self.gate.wait()
        finally:
            self.now_reading -= 1
        if self.error is not None:
            raise self.error
        return ListPendingCallsResponse(calls=found)


class Tab:
    def __init__(self, pending: Pending, caller: Principal, wanted: ListPendingCallsRequest = MINE) -> None:
        self._parts = pending.watch(caller, wanted, silence_seconds=3600)
        self.responses: list[WatchPendingResponse] = []
        self.error: PawlError | None = None
        self.task = asyncio.create_task(self._read())

    @property
    def call_ids(self) -> list[str]:
        return [call.call_id for part in self.responses for call in part.calls]

    async def _read(self) -> None:
        try:
            async for part in self._parts:
                self.responses.append(part)
        except PawlError as error:
            self.error = error
        finally:
            await self._parts.aclose()


class World:
    def __init__(self) -> None:
        self.ledger, self.clock = Ledger(), ManualClock()
        self.pending = Pending(ledger=self.ledger, clock=self.clock, poll_seconds=1.0)
        self.tabs: list[Tab] = []
        self.live = FakeLive()
        self.following: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        self.following = asyncio.create_task(self.pending.follow(self.live))
        await self.clock.advance(2)

    def say(self, user: str = "me", store: str = "local") -> None:
        for changed in self.live.inboxes:
            changed(StoreId(store), UserId(user))

    def open(self, caller: Principal, wanted: ListPendingCallsRequest = MINE) -> Tab:
        self.tabs.append(tab := Tab(self.pending, caller, wanted))
        return tab

    async def settle(self) -> None:
        await self.clock.advance(0)

    async def leave(self, *tabs: Tab) -> None:
        for tab in tabs:
            tab.task.cancel()
        await asyncio.gather(*(tab.task for tab in tabs), return_exceptions=True)


@asynccontextmanager
async def _world() -> AsyncIterator[World]:
    made = World()
    try:
        yield made
    finally:
        await made.leave(*made.tabs)
        if made.following is not None:
            made.following.cancel()
            await asyncio.gather(made.following, return_exceptions=True)


async def test_watchers_with_different_views_use_separate_polls() -> None:
    async with _world() as world:
        mine, yours, _ = world.open(CALLER), world.open(OTHER), world.open(ADMIN_CALLER)
        of_store, refused = world.open(ADMIN_CALLER, STORE_WIDE), world.open(CALLER, STORE_WIDE)
        await world.clock.advance(3)
        assert (mine.call_ids, yours.call_ids, of_store.call_ids) == (["call_1"], ["call_2"], ["call_1"])
        assert (type(refused.error), refused.responses) == (PermissionDenied, [])
        assert world.ledger.asked == {("me", False): 2 * 4, ("you", False): 4, ("me", True): 4}


async def test_watcher_that_joins_during_a_poll_waits_for_the_next() -> None:
    """The watcher's first snapshot must include every item that existed before the watch started.

    Watchers that join during one poll share the next poll, with any credentials of the user.
    """
    async with _world() as world:
        world.ledger.gate.clear()
        early = world.open(CALLER)
        await world.settle()
        world.ledger.waiting["me"].append("call_3")
        late = [world.open(replace(CALLER, credential_id=CredentialId(f"key_{number}"))) for number in range(10)]
        await world.settle()
        world.ledger.gate.set()
        await world.settle()
        assert (early.call_ids, [tab.call_ids for tab in late]) == (["call_1"], [["call_1", "call_3"]] * 10)
        assert world.ledger.asked.total() == 2


async def test_polling_stops_only_when_the_last_watcher_leaves() -> None:
    async with _world() as world:
        world.ledger.gate.clear()
        first, second = world.open(CALLER), world.open(CALLER)
        await world.settle()
        await world.leave(first)
        assert world.ledger.now_reading == 1
        world.ledger.gate.set()
        await world.settle()
        assert second.call_ids == ["call_1"]
        world.ledger.gate.clear()
        await world.clock.advance(1)
        assert world.ledger.now_reading == 1
        await world.leave(second)
        assert (world.ledger.now_reading, len(asyncio.all_tasks())) == (0, 1)


async def test_an_idle_user_is_polled_rarely_and_changes_appear_after_a_pause() -> None:
    async with _world() as world:
        await world.follow()
        mine, yours, of_store = world.open(CALLER), world.open(OTHER), world.open(ADMIN_CALLER, STORE_WIDE)
        await world.clock.advance(2)
        world.ledger.asked.clear()
        await world.clock.advance(4 * FALLBACK_PAUSES)
        assert world.ledger.asked == {("me", False): 4, ("you", False): 4, ("me", True): 4}
        world.ledger.waiting["me"].append("call_3")
        world.ledger.waiting["you"].append("call_4")
        world.say("me", "other store")
        world.say("me")
        await world.clock.advance(1)
        assert (mine.call_ids, of_store.call_ids) == (["call_1", "call_3"], ["call_1", "call_3"])
        assert yours.call_ids == ["call_2"]
