"""ConversationService and conversation keys, including each way in which a request is rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pawl.agent.v1 import agent_pb2, steps_pb2, undo_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.client.history import history
from pawl.event.v1 import message_pb2
from tests.rpc.agent_loop.conftest import ME

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub


# ForkConversation and ImportConversation, including each way in which a request is rejected.


GOOD = history(
    [
        {"role": "user", "content": "How warm is it?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12"},
        {"role": "assistant", "content": "12 degrees"},
    ]
)


async def imported(conversations: ConversationServiceAsyncStub, **fields: Any) -> Any:
    request = pb.ImportConversationRequest(messages=GOOD, **fields)
    return (await conversations.ImportConversation(request, metadata=ME)).conversation


async def shown(stub: AgentServiceAsyncStub, conversation_id: str) -> list[message_pb2.Message]:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    return list((await stub.ListMessages(request, metadata=ME)).messages)


async def test_imported_history_gets_new_ids_and_can_be_forked(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations, title="Oslo", conversation_key="k")
    assert (made.title, made.last_message_number) == ("Oslo", 3)
    messages = await shown(stub, made.conversation_id)
    assert [message.text for message in messages] == ["How warm is it?", "", "12 degrees"]
    assert all(message.imported for message in messages)
    (call_id,) = messages[1].call_ids
    assert call_id != "call_1"
    (call,) = (await stub.ListCalls(agent_pb2.ListCallsRequest(run_id=messages[1].run_id), metadata=ME)).calls
    assert (call.call_id, call.provider_call_id, call.imported, call.user_id) == (call_id, "call_1", True, "me")
    request = pb.ForkConversationRequest(conversation_id=made.conversation_id, number=2)
    forked = (await conversations.ForkConversation(request, metadata=ME)).conversation
    assert (forked.forked_conversation_id, forked.forked_number, forked.title) == (made.conversation_id, 2, "Oslo")
    assert await shown(stub, forked.conversation_id) == messages[:2]
    assert not (await stub.ListRuns(agent_pb2.ListRunsRequest(), metadata=ME)).runs


async def test_imported_run_cannot_be_undone(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations)
    run_id = (await shown(stub, made.conversation_id))[0].run_id
    (call,) = (await stub.PreviewUndo(undo_pb2.PreviewUndoRequest(run_id=run_id), metadata=ME)).calls
    assert (call.state, "elsewhere" in call.reason) == (undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE, True)


async def test_watchers_see_an_imported_run_as_ended(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations)
    run_id = (await shown(stub, made.conversation_id))[0].run_id
    watched = stub.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id), metadata=ME)
    assert not [event async for response in watched for event in response.events]
    steps = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id=run_id), metadata=ME)
    assert not [change async for response in steps for change in response.changes]
