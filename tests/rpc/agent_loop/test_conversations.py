"""ConversationService and keys of conversations, as a client sees them, and each way in which it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from tests.rpc.agent_loop.client import Client
from tests.rpc.agent_loop.conftest import ME

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub


async def start(stub: AgentServiceAsyncStub, text: str = "Lunch on Friday?", metadata: Any = ME, **fields: Any) -> str:
    return (await stub.StartRun(agent_pb2.StartRunRequest(text=text, **fields), metadata=metadata)).run.conversation_id


async def test_a_key_leads_to_one_conversation_by_requests_and_by_frames(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    first = await start(stub, conversation_key="ticket 42")
    assert await start(stub, conversation_key="ticket 42") == first
    client = Client(stub)
    await client.hello()
    receipt = await client.ask(start=session_pb2.Start(text="And then?", conversation_key="ticket 42"))
    assert receipt.status == types_pb2.RECEIPT_STATUS_ACCEPTED
    request = agent_pb2.GetRunRequest(run_id=receipt.run_id)
    assert (await stub.GetRun(request, metadata=ME)).run.conversation_id == first
    by_key = pb.GetConversationRequest(conversation_key="ticket 42")
    found = (await conversations.GetConversation(by_key, metadata=ME)).conversation
    assert (found.conversation_id, found.queued_run_count, found.title) == (first, 2, "Lunch on Friday?")


async def test_conversations_are_listed_found_named_and_archived(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    ids = [await start(stub, text) for text in ("Lunch on Friday?", "Where is the invoice?", "Lunch is off")]

    async def listed(**fields: Any) -> list[str]:
        response = await conversations.ListConversations(pb.ListConversationsRequest(**fields), metadata=ME)
        return [found.conversation_id for found in response.conversations]

    assert await listed() == ids[::-1]
    assert await listed(query="lunch") == [ids[2], ids[0]]
    request = pb.UpdateConversationRequest(request_id="r1", conversation_id=ids[0], title="Kim", archived=True)
    changed = (await conversations.UpdateConversation(request, metadata=ME)).conversation
    assert (changed.title, changed.has_own_title, changed.archived) == ("Kim", True, True)
    assert await listed(archived=False) == [ids[2], ids[1]]
    assert await listed(archived=True) == await listed(query="kim") == [ids[0]]
    assert await start(stub, "Lunch is on again", conversation_id=ids[0]) == ids[0]
    assert ids[0] in await listed(archived=False)
