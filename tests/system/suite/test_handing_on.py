"""The story of things with names, with generated stubs alone: agents that change, conversations handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio

from pawl.agent.v1 import agent_pb2, agents_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceStub
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import agent_pb2 as values
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from tests.system.suite.client import Agent

if TYPE_CHECKING:
    from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceAsyncStub

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_SECONDS = 240
USER, ASSISTANT, TOOL = pb.HISTORY_ROLE_USER, pb.HISTORY_ROLE_ASSISTANT, pb.HISTORY_ROLE_TOOL
HISTORY = [
    pb.HistoryMessage(role=USER, text="How warm is it in Oslo?"),
    pb.HistoryMessage(
        role=ASSISTANT, calls=[pb.HistoryCall(call_id="abc", tool_name="weather", arguments_json='{"city": "Oslo"}')]
    ),
    pb.HistoryMessage(role=TOOL, call_id="abc", text='{"degrees": 12}'),
    pb.HistoryMessage(role=ASSISTANT, text="12 degrees, says the thermometer."),
]


def definition(name: str, *tools: str, delegates_to: tuple[str, ...] = ()) -> values.AgentDefinition:
    return values.AgentDefinition(
        name=name,
        options=run_pb2.RunOptions(instructions=f"You are {name}."),
        tools=values.ToolSelection(names=tools),
        delegates_to=delegates_to,
        labels={"team": "sales"},
    )


@pytest_asyncio.fixture(loop_scope="session")
async def register(agent: Agent) -> AsyncIterator[AgentRegistryServiceAsyncStub]:
    """The register, with booker, who may give tasks to summer."""
    stub = AgentRegistryServiceStub(agent.channel)
    for made in (definition("summer", "calculate"), definition("booker", "send_email", delegates_to=("summer",))):
        await stub.UpdateAgent(agents_pb2.UpdateAgentRequest(definition=made), metadata=agent.metadata)
    yield stub
    for name in ("booker", "summer"):
        await stub.DeleteAgent(agents_pb2.DeleteAgentRequest(name=name), metadata=agent.metadata)


async def run(me: Agent, text: str, **fields: object) -> run_pb2.Run:
    """A run that has been started."""
    request = agent_pb2.StartRunRequest(text=text, **fields)  # type: ignore[arg-type]  # fields of the request
    return (await me.stub.StartRun(request, metadata=me.metadata)).run


async def listed(me: Agent, **fields: object) -> list[run_pb2.Run]:
    request = agent_pb2.ListRunsRequest(**fields)  # type: ignore[arg-type]  # fields of the request
    return list((await me.stub.ListRuns(request, metadata=me.metadata)).runs)


async def texts(agent: Agent, conversation_id: str, metadata: Any = None) -> str:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    found = (await agent.stub.ListMessages(request, metadata=metadata or agent.metadata)).messages
    return "\n".join(message.text for message in found)


async def test_a_conversation_is_imported_continued_forked_and_erased_while_agents_delegate(
    agent: Agent, other_agent: Agent, register: AgentRegistryServiceAsyncStub
) -> None:
    conversations = ConversationServiceStub(agent.channel)
    request = pb.ImportConversationRequest(messages=HISTORY, request_id="import")
    imported = (await conversations.ImportConversation(request, metadata=agent.metadata)).conversation.conversation_id
    assert await listed(agent, conversation_id=imported) == [], "what happened elsewhere is no run"

    asked = 'call run_agent with {"task": "what is 6 * 7?", "agent": "summer"}'
    labels = {"story": "handing-on"}
    first = await run(agent, asked, conversation_id=imported, agent="booker", labels=labels)
    done = await other_agent.until_ended(first.run_id)
    assert (done.state, done.agent.name, dict(done.labels)) == (run_pb2.RUN_STATE_COMPLETED, "booker", labels)
    assert "42" in done.output_text
    (child,) = await listed(agent, parent_run_id=first.run_id)
    assert child.agent.name == "summer"
    assert [found.agent_name for found in child.above] == ["booker"]
    assert [found.run_id for found in await listed(agent, labels=labels, agent="booker")] == [first.run_id]

    bob = (("pawl-user", "bob"), ("pawl-store", "local"))
    reading = pb.GetConversationRequest(conversation_id=imported)
    for sharing, readable in ((conversation_pb2.SHARING_READ, True), (conversation_pb2.SHARING_PRIVATE, False)):
        update = pb.UpdateConversationRequest(conversation_id=imported, sharing=sharing)
        await conversations.UpdateConversation(update, metadata=agent.metadata)
        if readable:
            assert "12 degrees" in await texts(agent, imported, bob)
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await conversations.GetConversation(reading, metadata=bob)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    fork = pb.ForkConversationRequest(conversation_id=imported, number=3, request_id="fork")
    forked = (await conversations.ForkConversation(fork, metadata=agent.metadata)).conversation.conversation_id
    other = await run(agent, "what is 400 * 2", conversation_id=forked)
    assert "800" in (await agent.until_ended(other.run_id)).output_text
    past = await texts(agent, forked)
    assert "12 degrees" in past
    assert "6 * 7" not in past

    erase = pb.EraseConversationRequest(conversation_id=imported)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await conversations.EraseConversation(erase, metadata=agent.metadata)).erasure.HasField("end_time"):
            pass
    assert await listed(agent, labels=labels) == []
    assert await listed(agent, parent_run_id=first.run_id) == []
    with pytest.raises(grpc.aio.AioRpcError):
        await texts(agent, imported)
    left = await texts(agent, forked)
    assert "12 degrees" not in left
    assert "400 * 2" in left
    again = await run(agent, "what is 3 * 3", conversation_id=forked)
    assert "9" in (await agent.until_ended(again.run_id)).output_text


async def test_a_run_that_waits_goes_on_with_the_version_that_it_was_started_with(
    agent: Agent, other_agent: Agent, register: AgentRegistryServiceAsyncStub
) -> None:
    started = await run(agent, "e-mail ann@example.com about lunch: see you at noon", agent="booker")
    call = await agent.until_pending(started.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    (waiting,) = await listed(agent, agent="booker", waits=[run_pb2.WAIT_KIND_APPROVAL])
    assert waiting.run_id == started.run_id
    changed = agents_pb2.UpdateAgentRequest(definition=definition("booker", "calculate"))
    saved = (await register.UpdateAgent(changed, metadata=agent.metadata)).agent
    assert saved.version == started.agent.version + 1
    await other_agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
    done = await other_agent.until_ended(started.run_id)
    assert (done.state, done.agent.version) == (run_pb2.RUN_STATE_COMPLETED, started.agent.version)
    newer = await run(agent, "what is 2 + 2", agent="booker")
    assert newer.agent.version == saved.version
    assert [tool.name for tool in (await agent.until_ended(newer.run_id)).tools] == ["calculate"]
