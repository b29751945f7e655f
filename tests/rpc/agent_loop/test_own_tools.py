"""Front-end tools that come with StartRun, a session or its Start frame: ownership and validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1.agents_pb2 import UpdateAgentRequest
from pawl.event.v1 import run_pb2
from pawl.tool.v1 import tool_pb2
from tests.fakes.registry import FakeChecker
from tests.rpc.agent_loop.asking import reason
from tests.rpc.agent_loop.client import ACCEPTED, Client
from tests.rpc.agent_loop.conftest import ADMIN, ME
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceAsyncStub
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
    unfit = await opened(stub, "cli_a", tool())
    fit = await opened(stub, "cli_b", runs=("show",))
    for client in (unfit, fit):
        await client.attach(run.run_id)
    await ledger.offer("call_1", run_id=run.run_id)
    assert (await fit.offer()).call.call_id == "call_1"
    assert holder(ledger, "call_1") == "cli_b"


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
    assert (await first.offer()).call.run_id == runs["cli_a"]
    assert (await second.offer()).call.run_id == runs["cli_b"]
    await ledger.offer("registered", "other", run_id=runs["cli_a"])
    assert not [kept for kept in third._kept if kept.HasField("offer")]


async def test_reconnected_client_gets_its_calls_without_naming_the_tools(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await opened(stub, "cli_a", tool())
    run_id = (await started(client, tool("form"))).run_id
    client.leave()
    await ledger.offer("call_1", "form", run_id=run_id)
    other = await opened(stub, "cli_b", tool(), tool("form"), runs=("show", "form"))
    await other.attach(run_id)
    back = await opened(stub, "cli_a")
    await back.attach(run_id)
    offer = await back.offer()
    assert offer.call.call_id == "call_1"
    assert (await back.answer(offer)).status == ACCEPTED


async def test_run_has_the_tools_from_its_session_and_its_start_frame(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    client = await opened(stub, "cli_a", tool())
    assert sorted(own(ledger, (await started(client, tool("form"))).run_id).names) == ["form", "show"]
    request = session_pb2.UserMessage(conversation_id="conv_1", text="and now", policy=types_pb2.MESSAGE_POLICY_QUEUE)
    sent = await client.ask(message=request)
    assert not ledger.runs[sent.run_id].run.HasField("own_tools")


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
    assert len(ledger.runs) == 1


@pytest.mark.parametrize("fields", [{"options": NO_TOOLS}, {"agent": "bare"}])
async def test_run_without_tools_gets_none_from_the_session(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, agents: AgentRegistryServiceAsyncStub, fields: Any
) -> None:
    await save_without_tools(agents)
    client = await opened(stub, "cli_a", tool())
    receipt = await started(client, **fields)
    assert receipt.status == ACCEPTED
    assert not ledger.runs[receipt.run_id].run.HasField("own_tools")
    assert (await started(client, tool("form"), **fields)).reason == "INVALID_FIELD"


async def save_without_tools(agents: AgentRegistryServiceAsyncStub) -> None:
    request = UpdateAgentRequest()
    request.definition.name = "bare"
    request.definition.options.without_tools = True
    await agents.UpdateAgent(request, metadata=ADMIN)
