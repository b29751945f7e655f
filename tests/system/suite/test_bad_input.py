"""Bad input: each gets a status and a reason of its own, and no service has more to say about it than one line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.message import Message

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from tests.keys import keyed_channel
from tests.system.suite import bad_requests, refusals
from tests.system.suite.client import Agent, Session
from tests.system.suite.refusals import Refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = session_pb2.SessionRequest(frame_id="hello", hello=session_pb2.Hello())
_COMPLAINTS = re.compile(r"rpc\.failed|Traceback|never awaited|never retrieved")


@pytest.fixture(scope="module", autouse=True)
def no_complaints(suite: Suite) -> Iterator[None]:
    """After all this no log has a traceback: what is wrong with a request is the client's affair."""
    logs = [path for path in suite.folder.logs.glob("*.log") if not path.name.startswith("postgres")]
    began = {path: path.stat().st_size for path in logs}
    yield
    for path, offset in began.items():
        new = path.read_bytes()[offset:].decode(errors="replace")
        assert [line for line in new.splitlines() if _COMPLAINTS.search(line)] == [], path.name


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def channels(suite: Suite) -> AsyncIterator[dict[str, grpc.aio.Channel]]:
    """A bare channel to each service."""
    options = [("grpc.max_send_message_length", -1)]
    opened = {
        name: keyed_channel(suite.endpoints.services[process][0].grpc, options=options)
        for name, process in refusals.PROCESSES.items()
    }
    yield opened
    for channel in opened.values():
        await channel.close()


def _stated_codes() -> dict[str, grpc.StatusCode]:
    """Return the code that the contract states with each reason."""
    text = Path("proto/pawl/error/v1/error.proto").read_text(encoding="utf-8")
    found = re.findall(r"// ([A-Z_]+)\. (?:(?!ERROR_REASON_)[^\n]|\n)*?\n  ERROR_REASON_([A-Z_]+) = ", text)
    return {reason: grpc.StatusCode[code] for code, reason in found}


CODES = _stated_codes()


@pytest.mark.parametrize(
    "bad",
    [pytest.param(bad, id=f"{bad[1]} {bad[2]}".encode("unicode_escape").decode()) for bad in bad_requests.all_bad()],
)
async def test_a_bad_request_has_its_own_status_and_reason(
    channels: dict[str, grpc.aio.Channel], bad: bad_requests.Bad
) -> None:
    """LOOP-15: refused with a clear error, never dropped; UNKNOWN and INTERNAL are never seen."""
    service, method, _, request, reason, field = bad
    refused = await refusals.send(channels[service], service, method, request)
    assert (refused.code, refused.reason, refused.metadata.get("field", "")) == (CODES[reason], reason, field)


@pytest.mark.parametrize(
    ("service", "method", "request_", "reason"),
    [
        ("agent", "WatchRun", b"\xff", "MALFORMED_REQUEST"),
        ("agent", "WatchRun", agent_pb2.WatchRunRequest(run_id="a.>"), "INVALID_ID"),
        ("agent", "WatchRun", agent_pb2.WatchRunRequest(run_id="absent"), "RUN_NOT_FOUND"),
        ("agent", "WatchRun", agent_pb2.WatchRunRequest(run_id="x", after_seq=2**64 - 1), "INVALID_FIELD"),
        ("notify", "Subscribe", b"\xff", "MALFORMED_REQUEST"),
        ("notify", "Subscribe", notify_pb2.SubscribeRequest(after_number=2**64 - 1), "INVALID_FIELD"),
        ("execution", "ExecuteTool", b"", "PERMISSION_DENIED"),
    ],
)
async def test_a_bad_watch_ends_with_its_own_status_and_reason(
    channels: dict[str, grpc.aio.Channel], service: str, method: str, request_: Message | bytes, reason: str
) -> None:
    refused = await refusals.listen(channels[service], service, method, request_)
    assert (refused.code, refused.reason) == (CODES[reason], reason)


@pytest.mark.parametrize("who", [{"pawl-user": "a.>"}, {"pawl-store": "*"}, {"pawl-user": ""}])
async def test_nobody_gets_into_the_subjects_of_others_by_his_name(
    channels: dict[str, grpc.aio.Channel], who: dict[str, str]
) -> None:
    """I13: stores and users are parts of NATS subjects."""
    metadata = tuple(who.items())
    refused = await refusals.send(channels["agent"], "agent", "ListRuns", b"", metadata)
    assert (refused.reason, refused.metadata) == ("INVALID_ID", {"field": metadata[0][0]})


@pytest.mark.parametrize(
    "data",
    [bytes(range(256)) * 8, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\xff\x09"],
    ids=["noise", "HTTP/1.1", "half a frame"],
)
async def test_bytes_that_are_no_grpc_disturb_nobody(suite: Suite, agent: Agent, data: bytes) -> None:
    for replicas in suite.endpoints.services.values():
        host, _, port = (replicas[0].grpc or replicas[0].http).rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        await writer.drain()
        writer.close()
    assert (await refusals.outcome(agent.stub.ListRuns(agent_pb2.ListRunsRequest()))) == refusals.TAKEN


async def _end_of_session(channel: grpc.aio.Channel, *sent: Message | bytes) -> Refusal:
    """Return how a session ends after these frames."""
    stream: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/pawl.agent.v1.AgentService/Session")()

    async def drain() -> None:
        async for _ in stream:
            pass

    for frame in sent:
        await stream.write(frame if isinstance(frame, bytes) else frame.SerializeToString())
    return await refusals.outcome(drain())


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        ([session_pb2.SessionRequest(frame_id="1", attach=session_pb2.Attach(run_id="x"))], "HELLO_REQUIRED"),
        ([session_pb2.SessionRequest(heartbeat=session_pb2.ClientHeartbeat())], "HELLO_REQUIRED"),
        ([HELLO, HELLO], "HELLO_REQUIRED"),
        ([b""], "INVALID_FIELD"),
        ([b"\xff"], "MALFORMED_REQUEST"),
        ([HELLO, b"\xff"], "MALFORMED_REQUEST"),
        ([session_pb2.SessionRequest(frame_id="a.b", hello=session_pb2.Hello())], "INVALID_ID"),
        ([session_pb2.SessionRequest(frame_id="a", hello=session_pb2.Hello(client_id=">"))], "INVALID_ID"),
        ([session_pb2.SessionRequest(frame_id="a", hello=session_pb2.Hello(calls_max=65))], "INVALID_FIELD"),
    ],
)
async def test_a_session_that_does_not_begin_as_it_must_ends(
    channels: dict[str, grpc.aio.Channel], sent: list[Message | bytes], reason: str
) -> None:
    refused = await _end_of_session(channels["agent"], *sent)
    assert (refused.code, refused.reason) == (CODES[reason], reason)


async def _receipt(session: Session, **frame: Any) -> tuple[str, str]:
    receipt = await session.receipt(**frame)
    return types_pb2.ReceiptStatus.Name(receipt.status).removeprefix("RECEIPT_STATUS_"), receipt.reason


async def test_a_bad_frame_gets_a_receipt_and_the_session_goes_on(agent: Agent) -> None:
    """FE-2: typed receipts, for a call that is not to be run by a front end too."""
    run = await agent.start("book a table")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    ours: dict[str, Any] = {"run_id": run.run_id, "call_id": call.call_id, "offer_epoch": 1}

    def result(**fields: Any) -> dict[str, Any]:
        return {"tool_result": types_pb2.ToolResult(**(ours | {"content_json": b"1"} | fields))}

    def progress(**fields: Any) -> dict[str, Any]:
        return {"tool_progress": session_pb2.ToolProgressReport(**(ours | fields))}

    frames: list[tuple[dict[str, Any], str, str]] = [
        ({}, "REFUSED", "INVALID_FIELD"),
        ({"start": session_pb2.Start(text="")}, "REFUSED", "INVALID_FIELD"),
        ({"start": session_pb2.Start(text="x" * 262_145)}, "REFUSED", "TOO_LARGE"),
        ({"attach": session_pb2.Attach(run_id="absent")}, "UNKNOWN", "RUN_NOT_FOUND"),
        ({"attach": session_pb2.Attach(run_id=run.run_id, after_seq=9999)}, "REFUSED", "SEQ_BEYOND_END"),
        ({"attach": session_pb2.Attach(run_id=run.run_id, after_seq=2**64 - 1)}, "REFUSED", "INVALID_FIELD"),
        (result(), "REFUSED", "CALL_NOT_PENDING"),
        (result(offer_epoch=0), "REFUSED", "INVALID_FIELD"),
        (result(call_id="absent"), "UNKNOWN", "CALL_NOT_FOUND"),
        (result(content_json=b"NaN"), "REFUSED", "INVALID_JSON"),
        (result(content_json=b'"' + b"x" * 2**20 + b'"'), "REFUSED", "TOO_LARGE"),
        (progress(fraction=bad_requests.NAN), "REFUSED", "INVALID_FIELD"),
        (progress(message="x" * 1025), "REFUSED", "TOO_LARGE"),
        (progress(), "REFUSED", "CALL_NOT_PENDING"),
        ({"cancel": session_pb2.Cancel(run_id="absent")}, "UNKNOWN", "RUN_NOT_FOUND"),
        ({"message": session_pb2.UserMessage(conversation_id="x", text="x")}, "UNKNOWN", "CONVERSATION_NOT_FOUND"),
    ]
    async with agent.session("show_panel") as session:
        for frame, status, reason in frames:
            assert await _receipt(session, **frame) == (status, reason), frame
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight at 19:00")
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def _decide(agent: Agent, call: call_pb2.Call, store: str = "local", request_id: str = "", **fields: Any) -> str:
    right: dict[str, Any] = {
        "call_id": call.call_id,
        "kind": call_pb2.DECISION_KIND_APPROVE,
        "digest": call.approval.digest,
    }
    decision = types_pb2.CallDecision(**(right | fields))
    request = agent_pb2.DecideRequest(run_id=call.run_id, request_id=request_id, decision=decision)
    return (
        await refusals.outcome(agent.stub.Decide(request, metadata=(("pawl-store", store), ("pawl-user", "me"))))
    ).reason


async def test_a_bad_decision_changes_nothing_and_a_good_one_is_taken_once(suite: Suite, agent: Agent) -> None:
    """HITL-3, I9: within the store, with the digest that was shown, with arguments that fit, once."""
    before = set((suite.folder.path / "outbox").glob("**/*.eml"))
    run = await agent.start("e-mail eve@example.com about Lunch: See you at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    edit = call_pb2.DECISION_KIND_EDIT
    wrong = json.loads(call.arguments_json) | {"to": "nobody", "expression": "1"}
    assert await _decide(agent, call, digest="") == "DIGEST_REQUIRED"
    assert await _decide(agent, call, digest="0" * 64) == "DIGEST_MISMATCH"
    assert await _decide(agent, call, store="other") == "RUN_NOT_FOUND"
    assert await _decide(agent, call, call_id="absent") == "CALL_NOT_FOUND"
    assert await _decide(agent, call, kind=edit, arguments_json=b'{"expression": "1"}') == "INVALID_ARGUMENTS"
    assert await _decide(agent, call, kind=edit, arguments_json=json.dumps(wrong).encode()) == "INVALID_ARGUMENTS"
    resolve = agent_pb2.ResolveCallRequest(run_id=run.run_id, call_id=call.call_id, resolution=2)  # type: ignore[arg-type]
    assert (
        await refusals.outcome(agent.stub.ResolveCall(resolve, metadata=agent.metadata))
    ).reason == "CALL_NOT_PENDING"
    receipt = (await agent.submit(call, b"1")).receipts[0]
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "CALL_NOT_PENDING")
    assert set((suite.folder.path / "outbox").glob("**/*.eml")) == before
    assert await _decide(agent, call, request_id="yes") == ""
    assert await _decide(agent, call, request_id="yes") == ""
    assert await _decide(agent, call, request_id="yes", reason="other") == "REQUEST_ID_REUSED"
    assert await _decide(agent, call, request_id="no", kind=call_pb2.DECISION_KIND_REJECT) == "ALREADY_DECIDED"
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert await _decide(agent, call) == "ALREADY_DECIDED"
    assert len(set((suite.folder.path / "outbox").glob("**/*.eml")) - before) == 1


async def test_an_answer_after_the_deadline_is_too_late(agent: Agent) -> None:
    """HITL-1, D4: the question expires, the model is told, the run goes on."""
    options = run_pb2.RunOptions(limits=run_pb2.RunLimits(answer_timeout_seconds=0.2))
    run = await agent.start("book a table", options=options)
    ended = await agent.until_ended(run.run_id)
    (call,) = await agent.calls(run.run_id)
    assert (ended.state, call.state) == (run_pb2.RUN_STATE_COMPLETED, call_pb2.CALL_STATE_EXPIRED)
    answer: dict[str, Any] = {"kind": call_pb2.DECISION_KIND_ANSWER, "answer": "Tonight", "digest": ""}
    assert await _decide(agent, call, **answer) == "CALL_NOT_PENDING"


async def test_each_of_several_results_has_its_own_receipt(agent: Agent, other_agent: Agent) -> None:
    """FE-3, I11: duplicates in one request, by two clients, and bad ones beside good ones."""
    run = await agent.start("show me the plan")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_OFFERED)

    async def submit(client: Agent, request_id: str, *results: tuple[str, bytes]) -> list[str]:
        request = agent_pb2.SubmitToolResultsRequest(
            request_id=request_id,
            run_id=run.run_id,
            results=[types_pb2.ToolResult(call_id=call_id, content_json=content) for call_id, content in results],
        )
        answer = await client.stub.SubmitToolResults(request, metadata=client.metadata)
        return [types_pb2.ReceiptStatus.Name(receipt.status)[15:] for receipt in answer.receipts]

    bad = [("absent", b"1"), (call.call_id, b"{"), (call.call_id, b"")]
    assert await submit(agent, "", *bad) == ["UNKNOWN", "REFUSED", "REFUSED"]
    good = (call.call_id, b"1")
    both = await asyncio.gather(
        submit(agent, "a", good, good, (call.call_id, b"2")), submit(other_agent, "b", good, good, (call.call_id, b"2"))
    )
    assert sorted(both) in (
        [["ACCEPTED", "DUPLICATE", "REFUSED"], ["LATE", "LATE", "REFUSED"]],
        [["ACCEPTED", "DUPLICATE", "REFUSED"], ["LATE", "REFUSED", "REFUSED"]],
    )
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_cancelling_twice_or_after_the_end_shows_the_run_as_it_is(agent: Agent, other_agent: Agent) -> None:
    run = await agent.start("book a table")
    await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    request = agent_pb2.CancelRunRequest(run_id=run.run_id)
    stopped = {run_pb2.RUN_STATE_CANCELLING, run_pb2.RUN_STATE_CANCELLED}
    for client in (agent, other_agent):
        assert (await client.stub.CancelRun(request, metadata=client.metadata)).run.state in stopped
    ended = await agent.until_ended(run.run_id)
    last = await agent.stub.CancelRun(request, metadata=agent.metadata)
    assert (last.run.state, last.run.last_seq) == (run_pb2.RUN_STATE_CANCELLED, ended.last_seq)
    await refusals.outcome(agent.stub.CancelRun(request, metadata=(("pawl-user", "eve"),)))
    assert [event.type for event in await agent.events(run.run_id)].count("run.cancelled") == 1
