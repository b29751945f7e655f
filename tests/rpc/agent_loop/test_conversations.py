"""ConversationService and keys of conversations, as a client sees them, and each way in which it is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.chassis.rpc_server import RpcServer
from tests.rpc.agent_loop.client import Client
from tests.rpc.agent_loop.conftest import ME, STRANGERS
from tests.rpc.agent_loop.errors import reason

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceAsyncStub


@pytest.fixture
async def conversations(server: RpcServer) -> AsyncIterator[ConversationServiceAsyncStub]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield ConversationServiceStub(channel)


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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"conversation_key": "x" * 201}, "TOO_LARGE"),
        ({"conversation_key": "é" * 101}, "TOO_LARGE"),
        ({"conversation_key": "k", "conversation_id": "c1"}, "INVALID_FIELD"),
    ],
)
async def test_a_bad_key_begins_nothing(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub, fields: dict[str, str], expected: str
) -> None:
    request = agent_pb2.StartRunRequest(text="Hello", **fields)  # type: ignore[arg-type]
    assert await reason(stub.StartRun(request, metadata=ME)) == expected
    client = Client(stub)
    await client.hello()
    receipt = await client.ask(start=session_pb2.Start(text="Hello", **fields))  # type: ignore[arg-type]
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, expected)
    get = pb.GetConversationRequest(**fields)
    assert await reason(conversations.GetConversation(get, metadata=ME)) == expected
    assert not (await conversations.ListConversations(pb.ListConversationsRequest(), metadata=ME)).conversations


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


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_conversations_of_others_are_not_found(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub, stranger: Any
) -> None:
    """I13."""
    mine = await start(stub, conversation_key="k")
    for get in (pb.GetConversationRequest(conversation_id=mine), pb.GetConversationRequest(conversation_key="k")):
        assert await reason(conversations.GetConversation(get, metadata=stranger)) == "CONVERSATION_NOT_FOUND"
    request = pb.UpdateConversationRequest(conversation_id=mine, title="yours")
    assert await reason(conversations.UpdateConversation(request, metadata=stranger)) == "CONVERSATION_NOT_FOUND"
    for listing in (pb.ListConversationsRequest(), pb.ListConversationsRequest(query="lunch")):
        assert not (await conversations.ListConversations(listing, metadata=stranger)).conversations


@pytest.mark.parametrize(
    ("method", "request_", "expected"),
    [
        ("GetConversation", pb.GetConversationRequest(), "INVALID_FIELD"),
        ("GetConversation", pb.GetConversationRequest(conversation_id="a b"), "INVALID_ID"),
        ("GetConversation", pb.GetConversationRequest(conversation_id="absent"), "CONVERSATION_NOT_FOUND"),
        ("GetConversation", pb.GetConversationRequest(conversation_key="absent"), "CONVERSATION_NOT_FOUND"),
        ("ListConversations", pb.ListConversationsRequest(page_size=201), "INVALID_FIELD"),
        ("ListConversations", pb.ListConversationsRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
        ("ListConversations", pb.ListConversationsRequest(query="?!"), "INVALID_FIELD"),
        ("ListConversations", pb.ListConversationsRequest(query="a\0b"), "INVALID_FIELD"),
        ("ListConversations", pb.ListConversationsRequest(query="x" * 201), "TOO_LARGE"),
        ("UpdateConversation", pb.UpdateConversationRequest(title="x"), "INVALID_ID"),
        ("UpdateConversation", pb.UpdateConversationRequest(conversation_id="absent"), "INVALID_FIELD"),
        (
            "UpdateConversation",
            pb.UpdateConversationRequest(conversation_id="absent", title="x"),
            "CONVERSATION_NOT_FOUND",
        ),
        *(
            ("UpdateConversation", pb.UpdateConversationRequest(conversation_id="absent", title=title), "INVALID_FIELD")
            for title in ("x" * 201, "two\nlines", " ", "bell\a", "nul\0", "line\u2028separator")
        ),
    ],
)
async def test_bad_requests_are_refused(
    conversations: ConversationServiceAsyncStub, method: str, request_: Any, expected: str
) -> None:
    assert await reason(getattr(conversations, method)(request_, metadata=ME)) == expected


async def test_the_same_update_has_its_effect_once(
    stub: AgentServiceAsyncStub, conversations: ConversationServiceAsyncStub
) -> None:
    """I2."""
    conversation_id = await start(stub)

    async def named(title: str, request_id: str = "") -> str:
        request = pb.UpdateConversationRequest(request_id=request_id, conversation_id=conversation_id, title=title)
        return (await conversations.UpdateConversation(request, metadata=ME)).conversation.title

    assert [await named("a", "r1"), await named("b"), await named("a", "r1")] == ["a", "b", "b"]
    request = pb.UpdateConversationRequest(request_id="r1", conversation_id=conversation_id, title="c")
    assert await reason(conversations.UpdateConversation(request, metadata=ME)) == "REQUEST_ID_REUSED"
