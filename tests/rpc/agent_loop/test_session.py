"""The Session stream: frames, receipts, attachments and every way in which it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.agent_loop.api.session_stream import Outgoing, SessionTimes
from pawl.agent_loop.api.watch import Watches
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.server.rpc.server import RpcServer
from tests.fakes.session_agent import FakeLive
from tests.poll import until
from tests.rpc.agent_loop.asking import ACCEPTED, REFUSED, Client, connected, failure, own_tool, reason
from tests.rpc.agent_loop.conftest import APPROVER
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import AgentServiceAsyncStub

LATE, UNKNOWN = types_pb2.RECEIPT_STATUS_LATE, types_pb2.RECEIPT_STATUS_UNKNOWN
DUPLICATE = types_pb2.RECEIPT_STATUS_DUPLICATE


@pytest.fixture
async def client(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> Client:
    await ledger.add_run()
    return await connected(stub)


async def test_first_frame_must_be_a_valid_hello(stub: AgentServiceAsyncStub) -> None:
    tool = session_pb2.ClientTool
    frames: list[tuple[dict[str, Any], str]] = [
        ({"heartbeat": session_pb2.ClientHeartbeat()}, "HELLO_REQUIRED"),
        ({"attach": session_pb2.Attach(run_id="run_1")}, "HELLO_REQUIRED"),
        ({}, "INVALID_FIELD"),
        ({"hello": session_pb2.Hello(client_id="a b")}, "INVALID_ID"),
        ({"hello": session_pb2.Hello(calls_max=65)}, "INVALID_FIELD"),
        ({"hello": session_pb2.Hello(tools=[tool()])}, "INVALID_FIELD"),
        ({"hello": session_pb2.Hello(tools=[tool(name="x" * 257)])}, "INVALID_FIELD"),
        # Tools are kept as long as the stream exists and need 20 times their size in the frame.
        ({"hello": session_pb2.Hello(tools=2 * [tool(name="x", versions=range(5001))])}, "INVALID_FIELD"),
        ({"hello": session_pb2.Hello(front_end_tools=[own_tool("big", "x" * 70_000)])}, "TOO_LARGE"),
        ({"hello": session_pb2.Hello(), "frame_id": "a b"}, "INVALID_ID"),
    ]
    for frame, expected in frames:
        client = Client(stub)
        await client.send(**frame)
        assert await reason(client.end()) == expected, frame
    client = Client(stub)
    assert (await client.hello("")).startswith("cli_")
    await client.send(hello=session_pb2.Hello(client_id="cli_a"))
    assert await reason(client.end()) == "HELLO_REQUIRED"
    closed = Client(stub)
    await closed.stream.done_writing()
    assert await reason(closed.end()) == "HELLO_REQUIRED"


async def test_clients_unread_output_is_limited_in_bytes() -> None:
    """A limit on frames alone would allow 64 events of 1 MiB on each of a user's 200 streams."""
    outgoing = Outgoing(64)

    def event(size_bytes: int) -> session_pb2.SessionResponse:
        delta = event_pb2.OutputDelta(text="x" * size_bytes)
        return session_pb2.SessionResponse(event=event_pb2.RunEvent(seq=1, output_delta=delta))

    for _ in range(2):
        outgoing.put_nowait(event(1024 * 1024 // 2))
    with pytest.raises(asyncio.QueueFull):
        outgoing.put_nowait(event(1))
    waiting = asyncio.ensure_future(
        outgoing.put(session_pb2.SessionResponse(welcome=session_pb2.Welcome(client_id="c")))
    )
    assert await outgoing.get() == event(1024 * 1024 // 2)
    await waiting
    assert outgoing.qsize() == 2


async def test_started_run_is_attached_from_its_first_event(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    client = await connected(stub)
    await client.send(start=session_pb2.Start(text="Hello"))
    first = await client.next("receipt", "event")
    assert (first.receipt.frame_id, first.receipt.status, first.receipt.run_id) == ("f2", ACCEPTED, "run_1")
    await ledger.append(count=3)
    await ledger.finish()
    assert await client.events(6) == [1, 2, 3, 4, 5, 6]
    assert (await client.next("end")).end == session_pb2.End(
        run_id="run_1", last_seq=6, state=run_pb2.RUN_STATE_COMPLETED
    )


async def test_frame_resent_after_a_reconnect_takes_effect_once(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """I2: the client id and the frame id identify a frame."""
    start = session_pb2.Start(text="Hello")
    cancel = session_pb2.Cancel(run_id="run_1")
    for number in range(3):
        client = await connected(stub, "cli_a")
        assert (await client.ask("again", start=start)).run_id == "run_1"
        assert (await client.ask("cancel", cancel=cancel)).status == (DUPLICATE if number else ACCEPTED)
        client.leave()
    assert (list(ledger.runs), len(ledger.commands)) == (["run_1"], 1)
    assert (await (await connected(stub, "cli_b")).ask("again", start=start)).run_id == "run_2"


async def test_attaching_again_moves_the_position(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.append(count=4)
    client = await connected(stub)
    await client.attach(after_seq=3)
    assert await client.events(2) == [4, 5]
    await client.attach(after_seq=1)
    assert await client.events(4) == [2, 3, 4, 5]
    await ledger.append()
    assert await client.events(1) == [6]


async def test_a_detached_run_does_not_send_any_more_events(
    client: Client, ledger: PlayedLedger, watches: Watches
) -> None:
    await client.attach()
    assert await client.events(1) == [1]
    assert ((await client.ask(detach=session_pb2.Detach(run_id="run_1"))).status, watches.feed_count) == (ACCEPTED, 0)
    await ledger.append()
    assert (await client.ask(detach=session_pb2.Detach(run_id="run_1"))).status == ACCEPTED
    assert not [kept for kept in client._kept if kept.HasField("event")]


async def test_invalid_frame_gets_a_receipt_and_the_stream_continues(client: Client) -> None:
    frames: list[tuple[dict[str, Any], Any, str]] = [
        ({}, REFUSED, "INVALID_FIELD"),
        ({"attach": session_pb2.Attach(run_id="no-such")}, UNKNOWN, "RUN_NOT_FOUND"),
        ({"attach": session_pb2.Attach(run_id="a b")}, REFUSED, "INVALID_ID"),
        ({"attach": session_pb2.Attach(run_id="run_1", after_seq=9)}, REFUSED, "SEQ_BEYOND_END"),
        ({"start": session_pb2.Start(text="")}, REFUSED, "INVALID_FIELD"),
        ({"start": session_pb2.Start(text="x", policy=99)}, REFUSED, "INVALID_FIELD"),  # type: ignore[arg-type]
        ({"start": session_pb2.Start(text="x", conversation_id="no-such")}, UNKNOWN, "CONVERSATION_NOT_FOUND"),
        ({"message": session_pb2.UserMessage(text="x")}, REFUSED, "INVALID_ID"),
        ({"message": session_pb2.UserMessage(conversation_id="no-such", text="x")}, UNKNOWN, "CONVERSATION_NOT_FOUND"),
        ({"cancel": session_pb2.Cancel(run_id="no-such")}, UNKNOWN, "RUN_NOT_FOUND"),
        ({"tool_result": types_pb2.ToolResult(run_id="run_1", call_id="call_1")}, REFUSED, "INVALID_FIELD"),
        (
            {"tool_result": types_pb2.ToolResult(run_id="run_1", call_id="call_1", offer_epoch=1)},
            REFUSED,
            "INVALID_JSON",
        ),
        (
            {"tool_result": types_pb2.ToolResult(call_id="call_1", offer_epoch=1, content_json=b"1")},
            REFUSED,
            "INVALID_ID",
        ),
        (
            {"tool_progress": session_pb2.ToolProgressReport(run_id="run_1", call_id="call_1", fraction=2)},
            REFUSED,
            "INVALID_FIELD",
        ),
        ({"decision": types_pb2.CallDecision(run_id="run_1", call_id="call_1")}, REFUSED, "INVALID_FIELD"),
        ({"frame_id": "a b", "cancel": session_pb2.Cancel(run_id="run_1")}, REFUSED, "INVALID_ID"),
    ]
    for frame, status, expected in frames:
        receipt = await client.ask(**frame)
        assert (receipt.status, receipt.reason) == (status, expected), frame
    assert (await client.attach()).status == ACCEPTED


async def test_decisions_messages_and_cancels_are_applied(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    client = await connected(stub, metadata=APPROVER)
    approve = types_pb2.CallDecision(
        run_id="run_1", call_id="call_1", kind=call_pb2.DECISION_KIND_APPROVE, digest="digest of call_1"
    )
    assert (await client.ask("d1", decision=approve)).status == ACCEPTED
    assert (await client.ask("d1", decision=approve)).status == DUPLICATE
    late = await client.ask("d2", decision=approve)
    assert (late.status, late.reason, late.call_id) == (LATE, "ALREADY_DECIDED", "call_1")
    message = await client.ask(message=session_pb2.UserMessage(conversation_id="conv_1", text="And then?"))
    assert (message.status, message.run_id) == (ACCEPTED, "run_2")
    assert (await client.ask(cancel=session_pb2.Cancel(run_id="run_1", reason="enough"))).status == ACCEPTED
    assert [command.WhichOneof("kind") for command in ledger.commands] == ["decision", "cancel"]


async def test_an_unavailable_ledger_ends_the_stream_without_a_receipt(client: Client, ledger: PlayedLedger) -> None:
    """Receipts are final; if the outcome is unknown, the client sends the frame again."""
    ledger.down = True
    await client.send(cancel=session_pb2.Cancel(run_id="run_1"))
    assert await reason(client.end()) == "DEPENDENCY_UNAVAILABLE"
    assert not [kept for kept in client._kept if kept.HasField("receipt")]


async def test_half_closed_client_still_gets_all_frames(client: Client, ledger: PlayedLedger) -> None:
    await client.attach()
    await client.stream.done_writing()
    await ledger.append(count=30)
    await ledger.finish()
    assert (await client.events(32), (await client.next("end")).end.last_seq) == (list(range(1, 33)), 32)
    assert await client.stream.read() is grpc.aio.EOF
    assert await client.stream.code() is grpc.StatusCode.OK


async def test_vanished_client_leaves_nothing_behind(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, watches: Watches, live: FakeLive, server: RpcServer
) -> None:
    """C12, I19: the client's feeds, subscriptions, tasks and streams end."""
    await ledger.add_run()
    tasks_before = len(asyncio.all_tasks())
    client = await connected(stub, "cli_a", "show")
    await client.attach()
    client.leave()
    await until(lambda: watches.feed_count == 0 and live.subscriber_count == 0)
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
    assert len(server._interceptor.streams) == 0


async def test_slow_client_is_disconnected_with_the_position_to_resume(
    stub: AgentServiceAsyncStub, client: Client, ledger: PlayedLedger
) -> None:
    """EVT-3: a client that resumes misses no event."""
    await client.attach()
    assert await client.events(1) == [1]

    for _ in range(600):
        await ledger.append(text="x" * 16 * 1024)
        await asyncio.sleep(0.0005)
    error = await failure(client.end())
    assert (error.reason, error.metadata["run_id"]) == ("SLOW_CONSUMER", "run_1")
    resume_after_seq = int(error.metadata["resume_after_seq"])
    read = [kept.event.seq for kept in client._kept if kept.HasField("event")]
    assert read == list(range(2, 2 + len(read)))
    again = await connected(stub)
    await again.attach(after_seq=resume_after_seq)
    assert await again.events(5) == list(range(resume_after_seq + 1, resume_after_seq + 6))


class TestSilence:
    @pytest.fixture
    def times(self) -> SessionTimes:
        return SessionTimes(heartbeat_seconds=0.05, silence_max_seconds=2.0)

    async def test_silent_client_is_disconnected(self, stub: AgentServiceAsyncStub) -> None:
        assert await reason((await connected(stub)).end()) == "DEADLINE_EXCEEDED"
        assert await reason(Client(stub).end()) == "DEADLINE_EXCEEDED", "also before its hello"


async def test_clients_second_stream_ends_the_first(stub: AgentServiceAsyncStub) -> None:
    first, second = Client(stub), Client(stub)
    await first.hello("cli_a")
    await second.hello("cli_a")
    assert await reason(first.end()) == "CANCELLED"
    assert (await second.ask(detach=session_pb2.Detach(run_id="run_1"))).status == ACCEPTED
