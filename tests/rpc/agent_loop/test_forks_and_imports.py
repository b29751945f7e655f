"""ForkConversation and ImportConversation, as a client sees them, and each way in which they are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, steps_pb2, undo_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.chassis.rpc_server import RpcServer
from pawl.client.history import history
from pawl.event.v1 import message_pb2
from tests.rpc.agent_loop.conftest import ME, STRANGERS
from tests.rpc.agent_loop.errors import reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub

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


@pytest.fixture
async def conversations(server: RpcServer) -> AsyncIterator[ConversationServiceAsyncStub]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield ConversationServiceStub(channel)


async def imported(conversations: ConversationServiceAsyncStub, **fields: Any) -> Any:
    request = pb.ImportConversationRequest(messages=GOOD, **fields)
    return (await conversations.ImportConversation(request, metadata=ME)).conversation


async def shown(stub: AgentServiceAsyncStub, conversation_id: str) -> list[message_pb2.Message]:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    return list((await stub.ListMessages(request, metadata=ME)).messages)


async def test_a_history_is_imported_with_ids_of_ours_and_can_be_forked(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations, title="Oslo", conversation_key="k")
    assert (made.title, made.last_message_number) == ("Oslo", 3)
    messages = await shown(stub, made.conversation_id)
    assert [message.text for message in messages] == ["How warm is it?", "", "12 degrees"]
    assert all(message.imported for message in messages)
    (call_id,) = messages[1].call_ids
    assert call_id != "call_1"
    calls = agent_pb2.ListCallsRequest(run_id=messages[1].run_id)
    (call,) = (await stub.ListCalls(calls, metadata=ME)).calls
    assert (call.call_id, call.provider_call_id, call.imported, call.user_id) == (call_id, "call_1", True, "me")
    request = pb.ForkConversationRequest(conversation_id=made.conversation_id, number=2)
    forked = (await conversations.ForkConversation(request, metadata=ME)).conversation
    assert (forked.forked_conversation_id, forked.forked_number, forked.title) == (made.conversation_id, 2, "Oslo")
    assert await shown(stub, forked.conversation_id) == messages[:2]
    assert not (await stub.ListRuns(agent_pb2.ListRunsRequest(), metadata=ME)).runs


async def test_nothing_of_an_import_can_be_undone(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations)
    run_id = (await shown(stub, made.conversation_id))[0].run_id
    (call,) = (await stub.PreviewUndo(undo_pb2.PreviewUndoRequest(run_id=run_id), metadata=ME)).calls
    assert (call.state, "elsewhere" in call.reason) == (undo_pb2.UNDO_STATE_CANNOT_BE_UNDONE, True)


async def test_the_run_of_an_import_has_ended_for_whoever_watches_it(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    made = await imported(conversations)
    run_id = (await shown(stub, made.conversation_id))[0].run_id
    watched = stub.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id), metadata=ME)
    assert not [event async for response in watched for event in response.events]
    steps = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id=run_id), metadata=ME)
    assert not [change async for response in steps for change in response.changes]


@pytest.mark.parametrize(
    ("method", "request_", "expected"),
    [
        ("ForkConversation", pb.ForkConversationRequest(), "INVALID_ID"),
        ("ForkConversation", pb.ForkConversationRequest(conversation_id="absent"), "CONVERSATION_NOT_FOUND"),
        ("ForkConversation", pb.ForkConversationRequest(conversation_id="c", number=2**63), "INVALID_FIELD"),
        ("ForkConversation", pb.ForkConversationRequest(conversation_id="c", request_id="a b"), "INVALID_ID"),
        ("ImportConversation", pb.ImportConversationRequest(), "INVALID_HISTORY"),
        ("ImportConversation", pb.ImportConversationRequest(messages=GOOD[:2]), "INVALID_HISTORY"),
        ("ImportConversation", pb.ImportConversationRequest(messages=GOOD[:1]), "INVALID_HISTORY"),
        ("ImportConversation", pb.ImportConversationRequest(messages=GOOD, title="a\nb"), "INVALID_FIELD"),
        ("ImportConversation", pb.ImportConversationRequest(messages=GOOD, conversation_key="x" * 201), "TOO_LARGE"),
        ("ImportConversation", pb.ImportConversationRequest(messages=GOOD, request_id="a b"), "INVALID_ID"),
    ],
)
async def test_bad_requests_are_refused(
    conversations: ConversationServiceAsyncStub, method: str, request_: Any, expected: str
) -> None:
    assert await reason(getattr(conversations, method)(request_, metadata=ME)) == expected
    assert not (await conversations.ListConversations(pb.ListConversationsRequest(), metadata=ME)).conversations


async def test_requests_about_what_is_there_are_refused(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    started = await stub.StartRun(agent_pb2.StartRunRequest(text="Hello", conversation_key="k"), metadata=ME)
    conversation_id = started.run.conversation_id
    forked = pb.ForkConversationRequest(conversation_id=conversation_id)
    assert await reason(conversations.ForkConversation(forked, metadata=ME)) == "FORK_POINT_OPEN"
    taken = pb.ImportConversationRequest(messages=GOOD, conversation_key="k")
    assert await reason(conversations.ImportConversation(taken, metadata=ME)) == "CONVERSATION_EXISTS"


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_strangers_fork_nothing(conversations: ConversationServiceAsyncStub, stranger: Any) -> None:
    """I13."""
    mine = (await imported(conversations)).conversation_id
    request = pb.ForkConversationRequest(conversation_id=mine)
    assert await reason(conversations.ForkConversation(request, metadata=stranger)) == "CONVERSATION_NOT_FOUND"


async def test_the_same_request_has_its_effect_once(conversations: ConversationServiceAsyncStub) -> None:
    """I2."""
    made = await imported(conversations, request_id="r1")
    assert await imported(conversations, request_id="r1") == made
    other = pb.ImportConversationRequest(messages=GOOD, request_id="r1", title="other")
    assert await reason(conversations.ImportConversation(other, metadata=ME)) == "REQUEST_ID_REUSED"
    request = pb.ForkConversationRequest(request_id="r2", conversation_id=made.conversation_id)
    forked = await conversations.ForkConversation(request, metadata=ME)
    assert await conversations.ForkConversation(request, metadata=ME) == forked
    request.number = 2
    assert await reason(conversations.ForkConversation(request, metadata=ME)) == "REQUEST_ID_REUSED"


async def test_a_fork_of_forks_has_a_bound(conversations: ConversationServiceAsyncStub, ledger: PlayedLedger) -> None:
    conversation_id = (await imported(conversations)).conversation_id
    for _ in range(64):
        request = pb.ForkConversationRequest(conversation_id=conversation_id)
        conversation_id = (await conversations.ForkConversation(request, metadata=ME)).conversation.conversation_id
        ledger.add_answer(conversation_id)
    request = pb.ForkConversationRequest(conversation_id=conversation_id)
    assert await reason(conversations.ForkConversation(request, metadata=ME)) == "PAST_TOO_LONG"
