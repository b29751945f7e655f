"""Front-end calls: one client at a time, under a lease, and again for somebody else (FE-2, I11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.agent_loop.app.public_values import ResultCommand
from pawl.chassis.ids import CallId, ClientId
from pawl.event.v1 import call_pb2
from tests.fakes.manual_clock import ManualClock
from tests.rpc.agent_loop.client import ACCEPTED, Client, until
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

LATE = types_pb2.RECEIPT_STATUS_LATE
WRONG_HOLDER = types_pb2.RECEIPT_STATUS_WRONG_HOLDER


async def attached(stub: AgentServiceAsyncStub, client_id: str = "cli_a", *tools: str, **hello: Any) -> Client:
    client = Client(stub)
    await client.hello(client_id, *(tools or ("show",)), **hello)
    await client.attach()
    return client


def expiry(ledger: PlayedLedger, call_id: str) -> int:
    return ledger.runs["run_1"].calls[call_id].offer.expire_time.seconds


def holder(ledger: PlayedLedger, call_id: str) -> str:
    return ledger.runs["run_1"].calls[call_id].offer.client_id


@pytest.fixture(autouse=True)
async def run(ledger: PlayedLedger) -> None:
    await ledger.add_run()


@pytest.mark.parametrize("before", [True, False])
async def test_an_offer_comes_whether_the_call_or_the_client_was_first(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock, before: bool
) -> None:
    if before:
        await ledger.offer("call_1")
    client = await attached(stub)
    if not before:
        await ledger.offer("call_1")
    offer = await client.offer()
    assert (offer.call.call_id, offer.offer_epoch, offer.call.tool_name) == ("call_1", 1, "show")
    assert offer.expire_time.seconds == int(clock.now() + 30)
    assert holder(ledger, "call_1") == "cli_a"


async def test_a_result_is_taken_once(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    offer = await client.offer()
    assert (await client.answer(offer, b'{"ok":true}')).status == ACCEPTED
    assert (await client.answer(offer, b'{"ok":false}')).status == LATE
    assert ledger.commands[0] == ResultCommand(
        call_id=CallId("call_1"),
        content_json=b'{"ok":true}',
        is_error=False,
        client_id=ClientId("cli_a"),
        offer_epoch=1,
    )
    assert not [kept for kept in client._kept if kept.HasField("offer_revoked")]


async def test_a_disconnect_offers_the_call_to_the_next_client(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    first = await attached(stub, "cli_a")
    await ledger.offer("call_1")
    old = await first.offer()
    second = await attached(stub, "cli_b")
    first.leave()
    offer = await second.offer()
    assert (offer.call.call_id, offer.offer_epoch) == ("call_1", 2)
    back = await attached(stub, "cli_a")
    assert (await back.answer(old)).status == WRONG_HOLDER
    assert (await second.answer(offer)).status == ACCEPTED


async def test_a_client_that_was_never_noticed_to_leave_takes_its_calls_back(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """The same client id, the same lease: what it was doing is not lost. As after kill -9 of a replica."""
    first = await attached(stub, "cli_a")
    await ledger.offer("call_1")
    offer = await first.offer()
    again = await attached(stub, "cli_a")
    assert (await again.offer()).offer_epoch == offer.offer_epoch
    assert (await again.answer(offer)).status == ACCEPTED
    assert not ledger.released


async def test_a_client_gets_no_more_than_it_can_run(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    client = await attached(stub, calls_max=2)
    for number in range(1, 5):
        await ledger.offer(f"call_{number}")
    offers = [await client.offer(), await client.offer()]
    assert [offer.call.call_id for offer in offers] == ["call_1", "call_2"]
    assert not holder(ledger, "call_3")
    await client.answer(offers[1])
    assert (await client.offer()).call.call_id == "call_3"
    assert not holder(ledger, "call_4")


async def test_only_tools_and_versions_that_the_client_runs_are_offered(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await attached(stub, "cli_a", "show", calls_max=9, versions=[2, 3])
    await ledger.offer("call_1", "show", version=1)
    await ledger.offer("call_2", "other", version=2)
    await ledger.offer("call_3", "show", version=3)
    assert (await client.offer()).call.call_id == "call_3"
    assert (holder(ledger, "call_1"), holder(ledger, "call_2")) == ("", "")


async def test_the_past_is_not_offered(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """Replayed events show calls as they were; only what is pending now is offered."""
    await ledger.offer("call_1")
    await ledger.settle("call_1")
    await ledger.offer("call_2")
    client = await attached(stub, calls_max=9)
    assert (await client.offer()).call.call_id == "call_2"
    assert await client.events(4) == [1, 2, 3, 4]


@pytest.mark.parametrize("state", [call_pb2.CALL_STATE_CANCELLED, call_pb2.CALL_STATE_EXPIRED])
async def test_a_call_that_is_settled_elsewhere_is_revoked(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, state: call_pb2.CallState.ValueType
) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    await ledger.offer("call_2")
    offer = await client.offer()
    await ledger.settle("call_1", state)
    revoked = (await client.next("offer_revoked")).offer_revoked
    assert (revoked.run_id, revoked.call_id) == ("run_1", "call_1")
    assert (await client.answer(offer)).status == LATE
    assert (await client.offer()).call.call_id == "call_2"


async def test_a_lost_lease_is_revoked_and_taken_anew(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    old = await client.offer()
    await ledger.lose_lease("call_1")
    assert (await client.next("offer_revoked")).offer_revoked.call_id == "call_1"
    offer = await client.offer()
    assert offer.offer_epoch == old.offer_epoch + 1
    assert (await client.answer(old)).status == WRONG_HOLDER
    await ledger.offer("call_2")
    assert not holder(ledger, "call_2")
    assert (await client.answer(offer)).status == ACCEPTED
    assert (await client.offer()).call.call_id == "call_2"


async def test_heartbeats_renew_and_silence_does_not(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    first = await attached(stub, "cli_a")
    await ledger.offer("call_1")
    await first.offer()
    await clock.advance(20)
    await first.heartbeat()
    await until(lambda: expiry(ledger, "call_1") >= clock.now() + 29)
    await clock.advance(31)
    second = await attached(stub, "cli_b")
    assert (await second.offer()).offer_epoch == 2
    assert (await first.next("offer_revoked")).offer_revoked.call_id == "call_1"


async def test_a_detach_gives_the_calls_of_that_run_back(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run("run_2")
    client = await attached(stub, calls_max=9)
    await client.attach("run_2")
    await ledger.offer("call_1")
    await ledger.offer("call_2", run_id="run_2")
    assert {(await client.offer()).call.call_id, (await client.offer()).call.call_id} == {"call_1", "call_2"}
    await client.ask(detach=session_pb2.Detach(run_id="run_1"))
    assert ledger.released == [("cli_a", "run_1")]
    assert not holder(ledger, "call_1")
    assert ledger.runs["run_2"].calls["call_2"].offer.client_id == "cli_a"
