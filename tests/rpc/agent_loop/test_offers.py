"""Front-end calls, leased to one client at a time (FE-2, I11), and front-end tools that come with a run or session."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1.agents_pb2 import UpdateAgentRequest
from pawl.chassis.ids import ClientId
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job_store.ledger.rules.rows import Offer
from pawl.tool.v1 import tool_pb2
from tests.fakes.manual_clock import ManualClock
from tests.fakes.registry import FakeChecker
from tests.poll import until
from tests.rpc.agent_loop.asking import ACCEPTED, Client, connected, reason
from tests.rpc.agent_loop.conftest import ADMIN, ME
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import AgentRegistryServiceAsyncStub, AgentServiceAsyncStub

LATE, WRONG_HOLDER = types_pb2.RECEIPT_STATUS_LATE, types_pb2.RECEIPT_STATUS_WRONG_HOLDER


async def attached(stub: AgentServiceAsyncStub, client_id: str = "cli_a", *tools: str, **hello: Any) -> Client:
    client = await connected(stub, client_id, *(tools or ("show",)), **hello)
    await client.attach()
    return client


def expiry(ledger: PlayedLedger, call_id: str) -> int:
    return ledger.runs["run_1"].calls[call_id].offer.expire_time.seconds


pytestmark = pytest.mark.usefixtures("run")


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
    assert (await (await attached(stub, "cli_a")).answer(old)).status == WRONG_HOLDER
    assert (await second.answer(offer)).status == ACCEPTED


async def test_client_does_not_get_more_calls_than_it_can_run(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await attached(stub, calls_max=2)
    for number in range(1, 5):
        await ledger.offer(f"call_{number}")
    offers = [await client.offer(), await client.offer()]
    assert [offer.call.call_id for offer in offers] == ["call_1", "call_2"]
    assert not holder(ledger, "call_3")
    await client.answer(offers[1])
    assert (await client.offer()).call.call_id == "call_3"
    assert not holder(ledger, "call_4")


async def test_only_tools_and_versions_of_the_client_are_offered(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await attached(stub, "cli_a", "show", calls_max=9, versions=[2, 3])
    for number, name in enumerate(("show", "other", "show"), 1):
        await ledger.offer(f"call_{number}", name, version=number)
    assert (await client.offer()).call.call_id == "call_3"
    assert (holder(ledger, "call_1"), holder(ledger, "call_2")) == ("", "")


async def test_replayed_events_do_not_offer_calls(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """Replayed events show past calls, but only pending calls are offered."""
    await ledger.offer("call_1")
    await ledger.settle("call_1")
    await ledger.offer("call_2")
    client = await attached(stub, calls_max=9)
    assert ((await client.offer()).call.call_id, await client.events(4)) == ("call_2", [1, 2, 3, 4])


@pytest.mark.parametrize("state", [call_pb2.CALL_STATE_CANCELLED, call_pb2.CALL_STATE_EXPIRED])
async def test_call_settled_elsewhere_is_revoked(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, state: call_pb2.CallState.ValueType
) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    await ledger.offer("call_2")
    offer = await client.offer()
    await ledger.settle("call_1", state)
    revoked = (await client.next("offer_revoked")).offer_revoked
    assert (revoked.run_id, revoked.call_id, (await client.answer(offer)).status) == ("run_1", "call_1", LATE)
    assert (await client.offer()).call.call_id == "call_2"


async def test_a_lost_lease_is_revoked_and_its_call_is_offered_again(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    old = await client.offer()
    await ledger.lose_lease("call_1")
    assert (await client.next("offer_revoked")).offer_revoked.call_id == "call_1"
    offer = await client.offer()
    assert (offer.offer_epoch, (await client.answer(old)).status) == (old.offer_epoch + 1, WRONG_HOLDER)
    await ledger.offer("call_2")
    assert not holder(ledger, "call_2")
    assert ((await client.answer(offer)).status, (await client.offer()).call.call_id) == (ACCEPTED, "call_2")


async def test_heartbeats_renew_the_lease_but_silence_does_not(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    first = await attached(stub, "cli_a")
    await ledger.offer("call_1")
    await first.offer()
    await clock.advance(20)
    await first.heartbeat()
    await until(lambda: expiry(ledger, "call_1") >= clock.now() + 29)
    await clock.advance(31)
    assert (await (await attached(stub, "cli_b")).offer()).offer_epoch == 2
    assert (await first.next("offer_revoked")).offer_revoked.call_id == "call_1"


async def test_detaching_a_run_releases_its_calls(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
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


async def leased(stub: AgentServiceAsyncStub, client_id: str) -> tuple[bool, int]:
    request = agent_pb2.LeaseCallRequest(run_id="run_1", call_id="call_1", client_id=client_id)
    response = await stub.LeaseCall(request, metadata=ME)
    assert response.lease_seconds == 30
    return response.granted, response.call.offer.offer_epoch


async def brought(stub: AgentServiceAsyncStub, client_id: str, epoch: int) -> types_pb2.ReceiptStatus.ValueType:
    result = types_pb2.ToolResult(call_id="call_1", content_json=b"1", offer_epoch=epoch)
    request = agent_pb2.SubmitToolResultsRequest(run_id="run_1", client_id=client_id, results=[result])
    return (await stub.SubmitToolResults(request, metadata=ME)).receipts[0].status


async def test_a_client_without_a_stream_can_lease_a_call_and_return_its_result(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    await ledger.offer("call_1")
    for client_id, expected in (
        ("tab_a", (True, 1)),
        ("tab_a", (True, 1)),
        ("tab_b", (False, 1)),
        ("tab_b", (True, 2)),
    ):
        assert await leased(stub, client_id) == expected
        await clock.advance(20)
    results = [("", 0, WRONG_HOLDER), ("tab_a", 1, WRONG_HOLDER), ("tab_b", 2, ACCEPTED), ("tab_a", 1, LATE)]
    for client_id, epoch, status in results:
        assert await brought(stub, client_id, epoch) == status
    assert await leased(stub, "tab_a") == (False, 2)


async def test_another_clients_call_is_not_leased_and_a_lost_call_is_revoked(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await attached(stub)
    await ledger.offer("call_1")
    offer = await client.offer()
    for client_id in ("tab_a", "cli_a"):
        assert await leased(stub, client_id) == (False, 1), "the stream of that client is the newer one"
    assert (await client.answer(offer)).status == ACCEPTED
    await ledger.offer("call_2")
    await client.offer()
    ledger.put_call("call_2", offer=Offer(client_id=ClientId("cli_z"), epoch=2, expire_time=None, lease_seconds=30.0))
    await client.heartbeat()
    assert (await client.next("offer_revoked")).offer_revoked.call_id == "call_2"


async def test_unavailable_ledger_only_delays_an_offer(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, lease_offer, away = await attached(stub), ledger.lease_offer, [DependencyUnavailable()]

    async def fail_once(*args: Any, **fields: Any) -> Any:
        if away:
            raise away.pop()
        return await lease_offer(*args, **fields)

    monkeypatch.setattr(ledger, "lease_offer", fail_once)
    await ledger.offer("call_1")
    await until(lambda: not away)
    await ledger.offer("call_2")
    assert (await client.offer()).call.call_id in {"call_1", "call_2"}


NO_TOOLS = run_pb2.RunOptions(without_tools=True)


def tool(name: str = "show", description: str = "Show it.") -> tool_pb2.ToolDefinition:
    return tool_pb2.ToolDefinition(name=name, description=description)


async def opened(
    stub: AgentServiceAsyncStub, client_id: str, *brought: tool_pb2.ToolDefinition, runs: tuple[str, ...] = ()
) -> Client:
    client = Client(stub)
    hello = session_pb2.Hello(
        client_id=client_id,
        front_end_tools=brought,
        tools=[session_pb2.ClientTool(name=name) for name in runs],
        calls_max=4,
    )
    assert (await client.ask(hello=hello)).status == ACCEPTED
    return client


async def started(client: Client, *brought: tool_pb2.ToolDefinition, frame_id: str = "", **fields: Any) -> Any:
    return await client.ask(frame_id, start=session_pb2.Start(text="go", front_end_tools=brought, **fields))


def own(ledger: PlayedLedger, run_id: str) -> run_pb2.OwnTools:
    return ledger.runs[run_id].run.own_tools


def holder(ledger: PlayedLedger, call_id: str) -> str:
    return next(run.calls[call_id].offer.client_id for run in ledger.runs.values() if call_id in run.calls)


async def test_run_tool_calls_are_offered_to_clients_that_name_the_tool(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    request = agent_pb2.StartRunRequest(text="go", front_end_tools=[tool(), tool("ask")])
    run = (await stub.StartRun(request, metadata=ME)).run
    assert run.own_tools == run_pb2.OwnTools(names=["show", "ask"])
    unfit, fit = await opened(stub, "cli_a", tool()), await opened(stub, "cli_b", runs=("show",))
    for client in (unfit, fit):
        await client.attach(run.run_id)
    await ledger.offer("call_1", run_id=run.run_id)
    assert ((await fit.offer()).call.call_id, holder(ledger, "call_1")) == ("call_1", "cli_b")


async def test_session_tool_calls_are_offered_only_to_that_session(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """Two front ends of one user may use the same tool name."""
    first, second = await opened(stub, "cli_a", tool()), await opened(stub, "cli_b", tool("show", "Another."))
    runs = {
        client_id: (await started(client)).run_id for client_id, client in {"cli_a": first, "cli_b": second}.items()
    }
    assert [own(ledger, run_id).client_id for run_id in runs.values()] == ["cli_a", "cli_b"]
    third = await opened(stub, "cli_c", tool(), runs=("show",))
    for client in (first, second, third):
        for run_id in runs.values():
            await client.attach(run_id)
    for client_id, run_id in runs.items():
        await ledger.offer(f"call of {client_id}".replace(" ", "_"), run_id=run_id)
    assert ((await first.offer()).call.run_id, (await second.offer()).call.run_id) == (runs["cli_a"], runs["cli_b"])
    await ledger.offer("registered", "other", run_id=runs["cli_a"])
    assert not [kept for kept in third._kept if kept.HasField("offer")]


async def test_reconnected_client_gets_its_calls_without_naming_the_tools(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await opened(stub, "cli_a", tool())
    run_id = (await started(client, tool("form"))).run_id
    client.leave()
    await ledger.offer("call_1", "form", run_id=run_id)
    await (await opened(stub, "cli_b", tool(), tool("form"), runs=("show", "form"))).attach(run_id)
    back = await opened(stub, "cli_a")
    await back.attach(run_id)
    offer = await back.offer()
    assert (offer.call.call_id, (await back.answer(offer)).status) == ("call_1", ACCEPTED)


async def test_run_has_the_tools_from_its_session_and_its_start_frame(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await opened(stub, "cli_a", tool())
    assert sorted(own(ledger, (await started(client, tool("form"))).run_id).names) == ["form", "show"]
    request = session_pb2.UserMessage(conversation_id="conv_1", text="and now", policy=types_pb2.MESSAGE_POLICY_QUEUE)
    run_id = (await client.ask(message=request)).run_id
    assert not ledger.runs[run_id].run.HasField("own_tools")


async def test_repeated_start_succeeds_after_the_tool_name_was_taken(
    stub: AgentServiceAsyncStub, checker: FakeChecker, ledger: PlayedLedger
) -> None:
    """I1, I2: the repeated request returns the first run."""
    request = agent_pb2.StartRunRequest(text="go", request_id="r1", front_end_tools=[tool()])
    run_id = (await stub.StartRun(request, metadata=ME)).run.run_id
    checker.taken = frozenset({"show"})
    assert (await stub.StartRun(request, metadata=ME)).run.run_id == run_id
    request.front_end_tools[0].description = "Another."
    assert await reason(stub.StartRun(request, metadata=ME)) == "REQUEST_ID_REUSED"
    request.request_id = "r2"
    assert await reason(stub.StartRun(request, metadata=ME)) == "TOOL_EXISTS"
    assert list(ledger.runs) == ["run_1", run_id]


@pytest.mark.parametrize("fields", [{"options": NO_TOOLS}, {"agent": "bare"}])
async def test_a_run_without_tools_does_not_get_any_from_the_session(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, agents: AgentRegistryServiceAsyncStub, fields: Any
) -> None:
    await save_without_tools(agents)
    client = await opened(stub, "cli_a", tool())
    receipt = await started(client, **fields)
    assert (receipt.status, ledger.runs[receipt.run_id].run.HasField("own_tools")) == (ACCEPTED, False)
    assert (await started(client, tool("form"), **fields)).reason == "INVALID_FIELD"


async def save_without_tools(agents: AgentRegistryServiceAsyncStub) -> None:
    request = UpdateAgentRequest()
    request.definition.name = "bare"
    request.definition.options.without_tools = True
    await agents.UpdateAgent(request, metadata=ADMIN)
