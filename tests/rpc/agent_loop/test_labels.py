"""Labels, and the filters of lists, as clients see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from pawl.agent.v1 import agent_pb2, conversation_pb2, session_pb2
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.chassis.rpc_server import RpcServer
from pawl.event.v1 import conversation_pb2 as values
from pawl.event.v1 import run_pb2
from tests.rpc.agent_loop.client import ACCEPTED, Client
from tests.rpc.agent_loop.conftest import ME, STRANGERS
from tests.rpc.agent_loop.errors import reason

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

APPROVAL = run_pb2.WAIT_KIND_APPROVAL


async def listed(stub: AgentServiceAsyncStub, metadata: Any = ME, **fields: Any) -> list[str]:
    response = await stub.ListRuns(agent_pb2.ListRunsRequest(**fields), metadata=metadata)
    return [run.run_id for run in response.runs]


async def test_runs_are_started_with_labels_by_requests_and_frames_and_found_by_them(
    stub: AgentServiceAsyncStub,
) -> None:
    request = agent_pb2.StartRunRequest(text="Go", labels={"env": "prod", "team": "a"})
    first = (await stub.StartRun(request, metadata=ME)).run
    assert dict(first.labels) == {"env": "prod", "team": "a"}
    client = Client(stub)
    await client.hello()
    receipt = await client.ask(start=session_pb2.Start(text="Go", labels={"env": "prod"}))
    assert receipt.status == ACCEPTED
    message = agent_pb2.SendMessageRequest(conversation_id=first.conversation_id, text="And?", labels={"team": "b"})
    third = (await stub.SendMessage(message, metadata=ME)).run
    assert await listed(stub, labels={"env": "prod"}) == [receipt.run_id, first.run_id]
    assert await listed(stub, labels={"env": "prod", "team": "a"}) == [first.run_id]
    assert await listed(stub, labels={"team": "b"}) == [third.run_id]
    assert not await listed(stub, labels={"env": "test"})
    for stranger in STRANGERS:
        assert not await listed(stub, stranger, labels={"env": "prod"})


async def test_runs_are_found_by_agent_parent_and_what_they_wait_for(stub: AgentServiceAsyncStub) -> None:
    run = (await stub.StartRun(agent_pb2.StartRunRequest(text="Go"), metadata=ME)).run
    assert await listed(stub, agent="default") == [run.run_id]
    assert not await listed(stub, agent="clerk")
    assert not await listed(stub, parent_run_id=run.run_id)
    assert not await listed(stub, waits=[APPROVAL])
    queued = agent_pb2.ListRunsRequest(waits=[APPROVAL], states=[run_pb2.RUN_STATE_QUEUED])
    for refused in (queued, agent_pb2.ListRunsRequest(waits=[99])):  # type: ignore[list-item]  # it is none
        assert await reason(stub.ListRuns(refused, metadata=ME)) == "INVALID_FIELD"
    for field in ("agent", "parent_run_id"):
        refused = agent_pb2.ListRunsRequest(**{field: "no id"})  # type: ignore[arg-type]  # a field
        assert await reason(stub.ListRuns(refused, metadata=ME)) == "INVALID_ID"


async def test_conversations_get_labels_and_are_found_by_them(stub: AgentServiceAsyncStub, server: RpcServer) -> None:
    run = (await stub.StartRun(agent_pb2.StartRunRequest(text="Go", labels={"a": "run"}), metadata=ME)).run
    async with grpc.aio.insecure_channel(server.address) as channel:
        conversations = ConversationServiceStub(channel)
        update = conversation_pb2.UpdateConversationRequest(conversation_id=run.conversation_id)
        update.labels.labels["env"] = "prod"
        assert dict((await conversations.UpdateConversation(update, metadata=ME)).conversation.labels) == {
            "env": "prod"
        }
        for wanted, count in (({"env": "prod"}, 1), ({"a": "run"}, 0)):
            request = conversation_pb2.ListConversationsRequest(labels=wanted)
            assert len((await conversations.ListConversations(request, metadata=ME)).conversations) == count
        update.labels.CopyFrom(values.Labels())
        assert not (await conversations.UpdateConversation(update, metadata=ME)).conversation.labels
