"""Suites with special settings: separate processes for clients and runs, and titles from the model."""

from __future__ import annotations

import grpc
import pytest

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.event.v1 import run_pb2
from tests.keys import LOCAL_KEY
from tests.poll import until
from tests.servers import running_suite
from tests.system.suite.client import Agent, addresses, outcome

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.long]


async def test_client_and_run_processes_can_be_separate() -> None:
    """PAWL_ROLE, PAWL_TITLES: a client process executes no runs, and a run process serves no clients."""
    settings = {"agent-loop": {"PAWL_ROLE": "api"}, "agent-loop-1": {"PAWL_ROLE": "worker", "PAWL_TITLES": "model"}}
    replicas = {"agent-loop": 2}
    async with running_suite(local_key=LOCAL_KEY, replicas=replicas, service_environment=settings) as suite:
        serving, driving = addresses(suite)
        async with Agent(serving) as agent, Agent(driving) as nobody:
            run = await agent.start("what is 17 * 23")
            await agent.whole_log(run.run_id)
            assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
            refused = await outcome(nobody.start("what is 6 * 7"))
            assert refused.code is grpc.StatusCode.UNIMPLEMENTED
            conversations = ConversationServiceStub(agent.channel)
            request = pb.GetConversationRequest(conversation_id=run.conversation_id)

            async def is_made() -> bool:
                answer = await conversations.GetConversation(request, metadata=agent.metadata)
                return answer.conversation.title == "About: what is 17 * 23"

            await until(is_made)
            await suite.stop_process("agent-loop", 1)
            waiting = await agent.start("what is 6 * 7")
            assert (await agent.get(waiting.run_id)).state == run_pb2.RUN_STATE_QUEUED
            await suite.start_process("agent-loop", 1)
            await agent.until_ended(waiting.run_id)
