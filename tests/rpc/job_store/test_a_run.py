"""One run from its message to its end."""

from __future__ import annotations

import pytest

from pawl.errors import QueueFull
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.rules import inbox
from tests.rpc.job_store.user import User


def image(size_bytes: int) -> message_pb2.Part:
    data = bytes(size_bytes)
    return message_pb2.Part(image=message_pb2.ImagePart(data=data, media_type="image/png", size_bytes=size_bytes))


async def test_a_multipart_message_is_complete_for_workers_but_abridged_for_clients(user: User) -> None:
    file = message_pb2.Part(file=message_pb2.FilePart(document_name="a.txt", text="Hello", size_bytes=5))
    parts = [message_pb2.Part(text="Look\nhere"), image(9), file, message_pb2.Part(text="and there")]
    owner = await user.start("", parts=parts)
    (message,) = (await owner.load()).messages
    assert (message.role, message.text) == (message_pb2.ROLE_USER, "Look\nhere\n\nand there")
    assert list(message.parts) == parts
    added_messages = [
        event.message_added.message for event in await user.events(owner.run_id) if event.type == "message.added"
    ]
    listed = await user.ask("ListMessages", conversation_id=message.conversation_id)
    for shown in (added_messages[0], listed.messages[0]):
        assert (shown.role, shown.parts[1].image.data, shown.parts[1].image.size_bytes) == (1, b"", 9)
        assert (shown.parts[2].file.text, shown.parts[2].file.size_bytes) == ("", 5)
    assert (await user.ask("GetConversation", conversation_id=message.conversation_id)).conversation.title == "Look"


@pytest.mark.parametrize(
    ("reason", "answers", "kept"),
    [
        ("PROVIDER_REFUSED", False, False),
        ("PROVIDER_REFUSED", True, True),
        ("PROVIDER_ERROR", False, True),
        ("", False, True),
    ],
)
async def test_images_of_a_refused_run_are_not_sent_again(user: User, reason: str, answers: bool, kept: bool) -> None:
    """Images of earlier or answered runs stay, because the provider did not refuse them."""
    owner = await user.start("", parts=[image(3)], conversation_id="c")
    await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    owner = await user.start("", parts=[image(4)], conversation_id="c")
    assert [len(message.parts[0].image.data) for message in (await owner.load()).messages] == [3, 4]
    if answers:
        await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="A dot.")])
    failure = run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason=reason)
    if reason:
        await owner.commit(state=run_pb2.RUN_STATE_FAILED, failure=failure)
    else:
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
    owner = await user.start("", parts=[image(5)], conversation_id="c")
    shown = [message.parts[0].image for message in (await owner.load()).messages if message.parts]
    assert [len(each.data) for each in shown] == [3, 4 if kept else 0, 5]
    assert shown[1].size_bytes == 4


async def test_a_run_is_loaded_with_only_the_newest_images(user: User) -> None:
    owner = await user.start("", parts=[image(900_000)], conversation_id="c")
    for _ in range(9):
        await owner.commit(state=run_pb2.RUN_STATE_COMPLETED)
        owner = await user.start("", parts=[image(900_000)], conversation_id="c")
    sizes = [len(message.parts[0].image.data) for message in (await owner.load()).messages]
    assert sizes == [0] + [900_000] * 9
    assert all(message.parts[0].image.size_bytes == 900_000 for message in (await owner.load()).messages)


STEER = pb.MESSAGE_POLICY_STEER
LARGE = "x" * 256 * 1024
FITTING = inbox.LIMITS.bytes_max // len(LARGE)


async def waiting(user: User) -> tuple[str, str]:
    """Return a parked run that waits for a result, and its conversation."""
    owner = await user.start()
    await owner.park(run_pb2.WAIT_KIND_TOOL_RESULT, calls=[owner.call("call", call_pb2.CALL_STATE_OFFERED)])
    return owner.run_id, (await user.run(owner.run_id)).conversation_id


async def fill(user: User, conversation_id: str, text: str, count: int) -> None:
    for _ in range(count):
        assert (await user.submit(text, conversation_id=conversation_id, policy=STEER)).steered


async def test_messages_count_towards_the_limit_until_they_enter_the_conversation(user: User) -> None:
    """Messages that the owner has read and holds in memory count too."""
    run_id, conversation_id = await waiting(user)
    await fill(user, conversation_id, LARGE, FITTING)
    owner = await user.take(run_id)
    unread = [command.command_id for command in await owner.inbox()]
    await owner.commit(consumed=unread, loop_state=b"all of them")

    with pytest.raises(QueueFull):
        await user.submit(LARGE, conversation_id=conversation_id, policy=STEER)
    await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_USER, text=LARGE)])

    await fill(user, conversation_id, LARGE, 1)
    with pytest.raises(QueueFull):
        await user.submit(LARGE, conversation_id=conversation_id, policy=STEER)


async def test_messages_of_superseded_runs_enter_before_the_next_run_starts(user: User) -> None:
    """I1, LOOP-13: the messages keep their order. A superseded run with an unread message is left to a worker."""
    owner = await user.start("1", conversation_id="c")
    interrupting = {"conversation_id": "c", "policy": pb.MESSAGE_POLICY_INTERRUPT}
    steered, _, last = [(await user.submit(text, **interrupting)).run.run_id for text in "234"]
    await user.send(steered, steer=pb.SteerCommand(text="and this"))
    for following in (steered, last):
        consumed = [command.command_id for command in await owner.inbox()]
        await owner.commit(state=run_pb2.RUN_STATE_CANCELLED, consumed=consumed)
        owner = await user.take(following)
    (page,) = await user.pages("ListMessages", "messages", conversation_id="c")
    assert [message.text for message in page] == ["1", "2", "3", "4"]
