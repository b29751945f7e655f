"""Messages with more than a text, at the door."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.agent_loop.wiring import ClientSide
from pawl.event.v1 import event_pb2, message_pb2
from tests.fakes.images import PNG
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.errors import reason

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

IMAGE = message_pb2.Part(image=message_pb2.ImagePart(data=PNG))
FILE = message_pb2.Part(file=message_pb2.FilePart(document_name="handbook.md"))


async def start(stub: AgentServiceAsyncStub, text: str = "Look", *parts: message_pb2.Part, **fields: Any) -> Any:
    request = agent_pb2.StartRunRequest(text=text, parts=parts, **fields)
    return (await stub.StartRun(request, metadata=ME)).run


async def messages(stub: AgentServiceAsyncStub, conversation_id: str) -> list[message_pb2.Message]:
    request = agent_pb2.ListMessagesRequest(conversation_id=conversation_id)
    return list((await stub.ListMessages(request, metadata=ME)).messages)


async def test_a_message_keeps_its_parts_and_what_is_shown_of_it_is_small(stub: AgentServiceAsyncStub) -> None:
    run = await start(stub, "Look", IMAGE, FILE, message_pb2.Part(text="What is it?"))
    (message,) = await messages(stub, run.conversation_id)
    assert (message.role, message.text) == (message_pb2.ROLE_USER, "Look\n\nWhat is it?")
    assert [part.WhichOneof("kind") for part in message.parts] == ["text", "image", "file", "text"]
    image, file = message.parts[1].image, message.parts[2].file
    assert (image.data, image.media_type, image.size_bytes) == (b"", "image/png", len(PNG))
    assert image.sha256 == hashlib.sha256(PNG).hexdigest()
    assert (file.text, file.size_bytes) == ("", len("Water the plants."))
    watching = stub.WatchRun(agent_pb2.WatchRunRequest(run_id=run.run_id), metadata=ME)
    added: list[event_pb2.RunEvent] = []
    async for answer in watching:
        added += [event for event in answer.events if event.type == "message.added"]
        if added:
            break
    watching.cancel()
    assert added[0].message_added.message.parts == message.parts


async def test_what_enters_a_run_is_a_text(stub: AgentServiceAsyncStub) -> None:
    run = await start(stub)
    request = agent_pb2.SendMessageRequest(
        conversation_id=run.conversation_id, parts=[IMAGE], policy=types_pb2.MESSAGE_POLICY_STEER
    )
    assert await reason(stub.SendMessage(request, metadata=ME)) == "INVALID_FIELD"
    request.policy = types_pb2.MESSAGE_POLICY_QUEUE
    assert (await stub.SendMessage(request, metadata=ME)).run.queue_position == 1


async def test_a_request_is_the_same_although_its_document_has_changed(
    stub: AgentServiceAsyncStub, clients: ClientSide
) -> None:
    """I2: and the message keeps the text that it came with."""
    first = await start(stub, "Look", FILE, request_id="r1")
    documents: Any = clients.messages._documents
    documents.documents["handbook.md"] = "Do not water the plants."
    again = await start(stub, "Look", FILE, request_id="r1")
    assert first.run_id == again.run_id
    other = agent_pb2.StartRunRequest(request_id="r1", text="Look", parts=[IMAGE])
    assert await reason(stub.StartRun(other, metadata=ME)) == "REQUEST_ID_REUSED"
