"""Titles that the model makes, with real processes: two replicas ask for one, and only once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_model_makes_the_title_and_its_user_has_the_last_word() -> None:
    with tempfile.TemporaryDirectory(prefix="pawl-titles-") as folder:
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"agent-loop": 2},
            service_environment={"agent-loop": {"PAWL_TITLES": "model"}},
        )
        async with Suite(options) as suite, Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
            conversations = ConversationServiceStub(agent.channel)
            run = await agent.start("what is 17 * 23")

            async def title() -> str:
                request = pb.GetConversationRequest(conversation_id=run.conversation_id)
                return (await conversations.GetConversation(request, metadata=agent.metadata)).conversation.title

            async def call_it(text: str) -> None:
                request = pb.UpdateConversationRequest(conversation_id=run.conversation_id, title=text)
                await conversations.UpdateConversation(request, metadata=agent.metadata)

            await agent.until_ended(run.run_id)

            async def is_made() -> bool:
                return await title() == "About: what is 17 * 23"

            await until(is_made)

            async def is_found() -> bool:
                query = pb.ListConversationsRequest(query="about")
                found = (await conversations.ListConversations(query, metadata=agent.metadata)).conversations
                return [each.conversation_id for each in found] == [run.conversation_id]

            await until(is_found)
            await call_it("Multiplication")
            assert await title() == "Multiplication"
            await call_it("")
            assert await is_made()
