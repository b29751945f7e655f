"""Front-end calls from offer to result, over two replicas (FE-1 to FE-4, I11), and the messages of a run."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.errors import InvalidField, QueueFull
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.rules import inbox
from pawl.server.db.database import Database
from pawl.tool.v1 import tool_pb2
from tests.rpc.job_store.conftest import Replica
from tests.rpc.job_store.user import Owner, User, result
from tests.rpc.refusals import raises


async def offered(user: User, *call_ids: str) -> Owner:
    owner = await user.start()
    calls = [
        owner.call(call_id, call_pb2.CALL_STATE_OFFERED, index=index)
        for index, call_id in enumerate(call_ids or ("call_1",))
    ]
    await owner.park(run_pb2.WAIT_KIND_TOOL_RESULT, calls=calls)
    return owner


async def bring(user: User, run_id: str, client_id: str, offer_epoch: int, command_id: str = "") -> str:
    receipt = await user.send(
        run_id,
        command_id,
        tool_result=pb.ToolResultCommand(
            call_id="call_1", client_id=client_id, offer_epoch=offer_epoch, result=result()
        ),
    )
    return pb.CommandOutcome.Name(receipt.outcome).removeprefix("COMMAND_OUTCOME_")


async def end_leases(database: Database) -> None:
    await database.execute("UPDATE job_store.calls SET offer_expire_time = now()")


async def test_a_call_that_a_client_takes_starts_executing(user: User) -> None:
    """Each lease reports one start. The call's duration counts from the lease that returns the result."""
    owner = await offered(user)
    names = {"store_id": "acme", "user_id": "ann", "client_id": "tab", "session_id": "ses_1"}
    await user.lease(owner.run_id, "call_1", "tab")
    await user.lease(owner.run_id, "call_1", "tab", session_id="ses_1")
    await user.ask("RenewOffers", **names, lease_seconds=60)
    await user.ask("ReleaseOffers", **names)
    assert not (await user.events(owner.run_id))[-1].call_changed.call.HasField("start_time")
    lease = await user.lease(owner.run_id, "call_1", "other")
    assert lease.call.HasField("start_time")
    assert await bring(user, owner.run_id, "other", lease.call.offer.offer_epoch, "cmd_1") == "ACCEPTED"
    successor = await user.take(owner.run_id, "w2")
    await successor.commit(
        calls=[successor.call("call_1", call_pb2.CALL_STATE_SUCCEEDED, result=result())],
        consumed=["cmd_1"],
        state=run_pb2.RUN_STATE_RUNNING,
    )
    events = [event for event in await user.events(owner.run_id) if event.HasField("call_changed")]
    assert [event.type for event in events] == [
        "tool.offered",
        "tool.executing",
        "tool.offered",
        "tool.executing",
        "tool.completed",
    ]
    ended = events[-1].call_changed
    took = ended.call.end_time.ToNanoseconds() - ended.call.start_time.ToNanoseconds()
    assert ended.duration_seconds == pytest.approx(took / 1e9)
    assert ended.duration_seconds > 0
    assert ended.call.start_time == lease.call.start_time


async def test_a_lost_session_does_not_release_calls_that_its_client_resumed_elsewhere(user: User) -> None:
    """FE-2: a client may reconnect to another replica before the first replica notices the disconnect."""
    owner = await offered(user, "call_1", "call_2")
    for call_id in ("call_1", "call_2"):
        await user.lease(owner.run_id, call_id, "tab", session_id="lost")
    again = await user.lease(owner.run_id, "call_1", "tab", session_id="new")
    assert (again.granted, again.call.offer.offer_epoch) == (True, 1)
    names = {"store_id": "acme", "user_id": "ann", "client_id": "tab"}
    renewed = await user.ask("RenewOffers", **names, session_id="lost", lease_seconds=60)
    assert [call.call_id for call in renewed.calls] == ["call_2"]
    for released_count in (1, 0):
        assert (await user.ask("ReleaseOffers", **names, session_id="lost")).released_count == released_count
    assert not (await user.lease(owner.run_id, "call_1", "other")).granted
    assert await bring(user, owner.run_id, "tab", 1) == "ACCEPTED"
    assert (await user.lease(owner.run_id, "call_2", "other")).granted


async def test_calls_of_a_vanished_client_are_offered_again(user: User, replica: Replica, database: Database) -> None:
    """FE-2: an event notifies all watchers."""
    owner = await offered(user)
    await user.lease(owner.run_id, "call_1", "tab")
    assert await replica.ledger.offer_again() == 0
    await end_leases(database)
    assert (await replica.ledger.offer_again(), await replica.ledger.offer_again()) == (1, 0)
    last = (await user.events(owner.run_id))[-1]
    assert (last.type, last.call_changed.call.offer.client_id, last.attempt) == ("tool.offered", "", 0)
    assert (await user.lease(owner.run_id, "call_1", "other")).call.offer.offer_epoch == 2


async def test_call_with_unknown_outcome_is_pending(user: User, owner: Owner) -> None:
    await owner.commit(calls=[owner.call("call_1", call_pb2.CALL_STATE_RUNNING, attempt=1)])
    assert list((await user.ask("ListPendingCalls")).calls) == []
    await owner.commit(state=run_pb2.RUN_STATE_NEEDS_ATTENTION, lease_action=pb.LEASE_ACTION_PARK)
    assert [call.call_id for call in (await user.ask("ListPendingCalls")).calls] == ["call_1"]
    assert [call.call_id for call in (await user.run(owner.run_id)).pending_calls] == ["call_1"]


def tool(name: str = "show") -> tool_pb2.OwnTool:
    definition = tool_pb2.ToolDefinition(name=name, description="Show it.")
    return tool_pb2.OwnTool(definition=definition, definition_sha256="ab" * 32)


async def begin(user: User, *tools: tool_pb2.OwnTool, request_id: str = "", **fields: Any) -> Any:
    values: dict[str, Any] = {"policy": pb.MESSAGE_POLICY_QUEUE, "asked_tools_sha256": b"asked"} | fields
    return (await user.ask("SubmitMessage", text="hello", request_id=request_id, tools=tools, **values)).run


async def test_a_run_lists_client_supplied_tools_but_only_services_get_their_definitions(user: User) -> None:
    run = await begin(user, tool())
    assert (await user.run(run.run_id)).own_tools.names == ["show"]
    answer = await user.ask("GetRun", run_id=run.run_id)
    assert not answer.own_tools
    answer = await user.ask("GetRun", run_id=run.run_id, user_id="")
    assert list(answer.own_tools) == [tool()]


async def test_invalid_tools_are_refused_and_leave_nothing_behind(user: User) -> None:
    await raises(
        InvalidField,
        *(begin(user, *tools) for tools in ((tool(), tool()), tuple(tool(f"t{number}") for number in range(65)))),
        begin(user, tool(), policy=pb.MESSAGE_POLICY_STEER),
    )
    assert not (await user.ask("ListRuns")).runs


async def test_unreadable_call_does_not_delay_others(user: User, replica: Replica, database: Database) -> None:
    owner = await offered(user, "call_1", "call_2")
    for call_id in ("call_1", "call_2"):
        await user.lease(owner.run_id, call_id, "tab")
    await end_leases(database)
    await database.execute("UPDATE job_store.calls SET decision = '' WHERE call_id = 'call_1'")
    assert await replica.ledger.offer_again() == 1
    assert (await user.lease(owner.run_id, "call_2", "other")).granted


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
    await user.talk("", parts=[image(3)], conversation_id="c")
    owner = await user.start("", parts=[image(4)], conversation_id="c")
    assert [len(message.parts[0].image.data) for message in (await owner.load()).messages] == [3, 4]
    if answers:
        await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text="A dot.")])
    failure = run_pb2.RunFailure(failure_class=run_pb2.FAILURE_CLASS_PROVIDER, reason=reason) if reason else None
    await owner.commit(state=run_pb2.RUN_STATE_FAILED if reason else run_pb2.RUN_STATE_COMPLETED, failure=failure)
    owner = await user.start("", parts=[image(5)], conversation_id="c")
    shown = [message.parts[0].image for message in (await owner.load()).messages if message.parts]
    assert ([len(each.data) for each in shown], shown[1].size_bytes) == ([3, 4 if kept else 0, 5], 4)


async def test_a_run_is_loaded_with_only_the_newest_images(user: User) -> None:
    for _ in range(9):
        await user.talk("", parts=[image(900_000)], conversation_id="c")
    owner = await user.start("", parts=[image(900_000)], conversation_id="c")
    assert [len(message.parts[0].image.data) for message in (await owner.load()).messages] == [0] + [900_000] * 9
    assert all(message.parts[0].image.size_bytes == 900_000 for message in (await owner.load()).messages)


STEER = pb.MESSAGE_POLICY_STEER
LARGE = "x" * 256 * 1024
FITTING = inbox.LIMITS.bytes_max // len(LARGE)


async def waiting(user: User) -> tuple[str, str]:
    """Return a parked run that waits for a result, and its conversation."""
    owner = await user.start()
    await owner.park(run_pb2.WAIT_KIND_TOOL_RESULT, calls=[owner.call("call", call_pb2.CALL_STATE_OFFERED)])
    return owner.run_id, owner.conversation_id


async def fill(user: User, conversation_id: str, text: str, count: int) -> None:
    for _ in range(count):
        assert (await user.submit(text, conversation_id=conversation_id, policy=STEER)).steered


async def test_messages_count_towards_the_limit_until_they_enter_the_conversation(user: User) -> None:
    """Messages that the owner has read and holds in memory count too."""
    run_id, conversation_id = await waiting(user)
    await fill(user, conversation_id, LARGE, FITTING)
    owner = await user.take(run_id)
    await owner.commit(consumed=[command.command_id for command in await owner.inbox()], loop_state=b"all of them")

    await raises(QueueFull, user.submit(LARGE, conversation_id=conversation_id, policy=STEER))
    await owner.commit(messages=[message_pb2.Message(role=message_pb2.ROLE_USER, text=LARGE)])

    await fill(user, conversation_id, LARGE, 1)
    await raises(QueueFull, user.submit(LARGE, conversation_id=conversation_id, policy=STEER))


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
