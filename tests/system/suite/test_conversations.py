"""Conversations by key, title and words, through two replicas and with real answers of the model."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import run_pb2
from pawl.launcher.suite import Suite
from tests.system.suite.client import PATIENCE_SECONDS, Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def listed(agent: Agent, **fields: object) -> list[str]:
    stub = ConversationServiceStub(agent.channel)
    request = pb.ListConversationsRequest(**fields)  # type: ignore[arg-type]
    answer = await stub.ListConversations(request, metadata=agent.metadata)
    return [conversation.conversation_id for conversation in answer.conversations]


async def until_found(agent: Agent, query: str) -> list[str]:
    """Search until something is found."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (found := await listed(agent, query=query)):
            await asyncio.sleep(0.05)
    return found


async def start(agent: Agent, text: str, key: str) -> run_pb2.Run:
    request = agent_pb2.StartRunRequest(text=text, conversation_key=key)
    return (await agent.stub.StartRun(request, metadata=agent.metadata)).run


async def test_a_conversation_is_begun_by_key_found_by_words_named_and_archived(
    suite: Suite, agent: Agent, other_agent: Agent
) -> None:
    """I2, I13."""
    text = "what is 1234 * 4321?"
    runs = await asyncio.gather(*(start(each, text, "room 7") for each in (agent, other_agent) * 3))
    assert len({run.run_id for run in runs}) == 6
    (conversation_id,) = {run.conversation_id for run in runs}
    for run in runs:
        assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    stub = ConversationServiceStub(other_agent.channel)
    by_key = pb.GetConversationRequest(conversation_key="room 7")
    found = (await stub.GetConversation(by_key, metadata=other_agent.metadata)).conversation
    assert (found.conversation_id, found.title) == (conversation_id, text)
    assert found.last_message_number >= 12
    assert (await listed(agent))[0] == conversation_id
    assert await until_found(other_agent, "1234 4321") == [conversation_id]
    assert await until_found(other_agent, "5332114") == [conversation_id]  # What the model said.

    update = pb.UpdateConversationRequest(conversation_id=conversation_id, title="Xylophones", archived=True)
    await stub.UpdateConversation(update, metadata=other_agent.metadata)
    assert await until_found(agent, "xylo") == [conversation_id]
    assert conversation_id not in await listed(agent, archived=False)
    again = await start(agent, "what is 2 * 3?", "room 7")
    assert again.conversation_id == conversation_id
    assert conversation_id in await listed(agent, archived=False)
    await agent.until_ended(again.run_id)

    async with Agent(suite.endpoints.services["agent-loop"][1].grpc, user="somebody-else") as stranger:
        assert conversation_id not in await listed(stranger)
        assert await listed(stranger, query="xylo") == []
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ConversationServiceStub(stranger.channel).GetConversation(by_key, metadata=stranger.metadata)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_conversations_of_sub_agents_are_not_in_the_list(agent: Agent) -> None:
    run = await agent.start("ask an agent to work out 6 * 7")
    ended = await agent.until_ended(run.run_id)
    calls = await agent.calls(ended.run_id)
    children = [call.child_run_id for call in calls if call.child_run_id]
    assert children
    child = await agent.get(children[0])
    found = await listed(agent, page_size=200)
    assert run.conversation_id in found
    assert child.conversation_id not in found
    get = pb.GetConversationRequest(conversation_id=child.conversation_id)
    answer = await ConversationServiceStub(agent.channel).GetConversation(get, metadata=agent.metadata)
    assert answer.conversation.parent_run_id == run.run_id
