"""Unary methods, ListSteps and WatchSteps: valid requests and each way in which a request is rejected."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, steps_pb2, types_pb2
from pawl.agent_loop.api import convert, watch
from pawl.agent_loop.loop import wire
from pawl.agent_loop.wiring import ClientSide
from pawl.errors import InvalidArguments
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.values import RunState
from tests.fakes.images import PNG
from tests.fakes.session_agent import FakeLive
from tests.poll import until
from tests.rpc.agent_loop.asking import ANSWER, DIGEST, EDIT, decide, reason
from tests.rpc.agent_loop.conftest import APPROVER, ME
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.refusals import raises
from tests.rpc.stubs import AgentServiceAsyncStub

pytestmark = pytest.mark.usefixtures("run")


async def test_created_run_has_its_requested_and_default_options(stub: AgentServiceAsyncStub) -> None:
    """LOOP-1: limits may be below or above the default."""
    options = run_pb2.RunOptions(limits=run_pb2.RunLimits(rounds_max=3, tool_timeout_seconds=60), temperature=0.0)
    response = await stub.StartRun(agent_pb2.StartRunRequest(text="Hello\n\tyou", options=options), metadata=ME)
    assert response.run.user_id == "me"
    kept = response.run.options
    assert (kept.model, kept.instructions) == ("the-model", "Be brief.")
    assert (kept.limits.rounds_max, kept.limits.run_timeout_seconds) == (3, 300.0)
    assert (kept.limits.tool_timeout_seconds, kept.limits.tool_timeout_seconds_max) == (60, 100)
    assert (kept.HasField("temperature"), kept.HasField("output_tokens_max")) == (True, False)
    assert kept.batch_order == run_pb2.BATCH_ORDER_WAIT_FOR_DECISIONS
    assert kept.limits.ListFields()[-1][0].name == "provider_wait_seconds"
    assert len(kept.limits.ListFields()) == len(run_pb2.RunLimits.DESCRIPTOR.fields)


async def test_each_result_gets_a_receipt_even_if_others_are_invalid(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """FE-3, I11: valid results take effect once."""
    for number in range(1, 4):
        await ledger.offer(f"call_{number}")
    await ledger.settle("call_3")
    contents = [("call_1", b'{"ok": true}'), ("call_2", b"{not json"), ("call_3", b"1"), ("call_4", b"1")]
    request = agent_pb2.SubmitToolResultsRequest(
        request_id="r1",
        run_id="run_1",
        results=[
            types_pb2.ToolResult(call_id=call_id, content_json=content, is_error=call_id == "call_1")
            for call_id, content in contents
        ],
    )
    response = await stub.SubmitToolResults(request, metadata=ME)
    assert [(each.call_id, each.status, each.reason) for each in response.receipts] == [
        ("call_1", types_pb2.RECEIPT_STATUS_ACCEPTED, ""),
        ("call_2", types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_JSON"),
        ("call_3", types_pb2.RECEIPT_STATUS_LATE, "CALL_NOT_PENDING"),
        ("call_4", types_pb2.RECEIPT_STATUS_UNKNOWN, "CALL_NOT_FOUND"),
    ]
    assert [call.call_id for call in response.run.pending_calls] == ["call_2"]
    (taken,) = ledger.commands
    result = call_pb2.CallResult(content_json=b'{"ok": true}', is_error=True, error_reason="TOOL_ERROR")
    assert taken.tool_result == ledger_pb2.ToolResultCommand(call_id="call_1", result=result)
    assert (await stub.SubmitToolResults(request, metadata=ME)).receipts[0].status == types_pb2.RECEIPT_STATUS_DUPLICATE


async def test_invalid_answer_is_rejected_and_the_question_stays_open(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    question = call_pb2.Question(answer_schema_json=b'{"type":"object"}')
    await ledger.add_call("call_1", call_pb2.CALL_STATE_ASKED, spec=call_pb2.Call(question=question))
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    answer = stub.Decide(decide(kind=ANSWER, digest="", answer="bad"), metadata=ME)
    await raises(InvalidArguments, answer, match="^the answer does not fit: it must be a number$")
    both = [
        types_pb2.CallDecision(run_id="run_1", call_id=call_id, kind=ANSWER, answer="bad")
        for call_id in ("call_1", "call_2")
    ]
    first, second = (await stub.DecideCalls(agent_pb2.DecideCallsRequest(decisions=both), metadata=ME)).receipts
    assert (first.status, first.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_ARGUMENTS")
    assert second.status == types_pb2.RECEIPT_STATUS_ACCEPTED, "any answer is valid"
    assert len(ledger.commands) == 1


async def test_edited_arguments_are_checked_and_made_canonical(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """HITL-3: an edit is validated and checked again before it is accepted, and gets its own digest."""
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    edit = stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "bad"}'), metadata=APPROVER)
    await raises(InvalidArguments, edit, match="^to: not an address; subject: missing$")
    assert not ledger.commands
    await stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "ann"}', reason="typo"), metadata=APPROVER)
    edited = ledger_pb2.DecisionCommand(
        call_id="call_1",
        kind=EDIT,
        digest=DIGEST,
        arguments_json=b'{"to":"ann"}',
        edited_digest="ef" * 32,
        reason="typo",
    )
    assert [command.decision for command in ledger.commands] == [edited]


async def test_cancelling_again_or_too_late_returns_the_run(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I12, EVT-4: a late cancel does not change the final state."""
    request = agent_pb2.CancelRunRequest(request_id="r1", run_id="run_1", reason="enough")
    for _ in range(2):
        assert (await stub.CancelRun(request, metadata=ME)).run.state == run_pb2.RUN_STATE_CANCELLING
    await ledger.finish()
    late = agent_pb2.CancelRunRequest(run_id="run_1")
    assert (await stub.CancelRun(late, metadata=ME)).run.state == run_pb2.RUN_STATE_COMPLETED


async def test_get_run_waits_until_the_run_waits_or_ends(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive
) -> None:
    """FE-3: one call replaces polling. With `after_seq`, it waits for a change of a run that already waits."""

    async def get(after_seq: int) -> asyncio.Future[agent_pb2.GetRunResponse]:
        request = agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=60, after_seq=after_seq)
        waiting = asyncio.ensure_future(stub.GetRun(request, metadata=ME))
        await until(lambda: live.subscriber_count)
        return waiting

    waiting = await get(0)
    await ledger.append(count=3)
    assert not waiting.done()
    await ledger.offer("call_1")
    await ledger.change("run_1", RunState.WAITING)
    run = (await waiting).run
    assert (run.state, [call.call_id for call in run.pending_calls]) == (run_pb2.RUN_STATE_WAITING, ["call_1"])
    await until(lambda: not live.subscriber_count)
    waiting = await get(run.last_seq)
    await ledger.settle("call_1")
    assert [call.call_id for call in (await waiting).run.pending_calls] == []
    await until(lambda: not live.subscriber_count)
    waiting = await get((await waiting).run.last_seq)
    await ledger.change("run_1", RunState.RUNNING)
    await ledger.finish()
    run = (await waiting).run
    assert run.state == run_pb2.RUN_STATE_COMPLETED
    request = agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=60, after_seq=run.last_seq)
    assert (await stub.GetRun(request, metadata=ME)).run == run, "nothing can follow"


@pytest.mark.parametrize(("asked", "limit"), [(0.05, 50), (60, 0.05)])
async def test_get_run_waits_no_longer_than_requested_or_allowed_by_proxies(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch, asked: float, limit: float
) -> None:
    assert watch.REST_SECONDS_MAX == 50
    monkeypatch.setattr(watch, "REST_SECONDS_MAX", limit)
    response = await stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=asked), metadata=ME)
    assert response.run.state == run_pb2.RUN_STATE_QUEUED


# Messages at the size limit of gRPC: none may block a replica or be too large for a client.


@pytest.mark.parametrize(("pending", "left"), [(0, (0, 4)), (1, (1, 3)), (4, (4, 0)), (7, (4, 0))])
def test_pending_calls_take_precedence_over_running_calls_in_a_full_message(
    pending: int, left: tuple[int, int]
) -> None:
    calls = [call_pb2.Call(call_id=f"call_{number}", arguments_json=b"x" * 500_000) for number in range(8)]
    run = run_pb2.Run(run_id="run_1", pending_calls=calls[:pending], active_calls=calls[pending:])
    shown = convert.run_message(run)
    assert (len(shown.pending_calls), len(shown.active_calls)) == left
    assert [*shown.pending_calls, *shown.active_calls] == calls[:4]
    assert len(run.active_calls) == 8 - pending, "the run itself is unchanged"


# Messages with parts besides text, at the API.


IMAGE = message_pb2.Part(image=message_pb2.ImagePart(data=PNG))
FILE = message_pb2.Part(file=message_pb2.FilePart(document_name="handbook.md"))


async def start(stub: AgentServiceAsyncStub, text: str = "Look", *parts: message_pb2.Part, **fields: Any) -> Any:
    return (await stub.StartRun(agent_pb2.StartRunRequest(text=text, parts=parts, **fields), metadata=ME)).run


async def test_repeated_request_matches_after_its_document_has_changed(
    stub: AgentServiceAsyncStub, clients: ClientSide
) -> None:
    """I2: the message keeps its original text."""
    first = await start(stub, "Look", FILE, request_id="r1")
    documents: Any = clients.messages._registry
    documents.documents["handbook.md"] = "Do not water the plants."
    assert first.run_id == (await start(stub, "Look", FILE, request_id="r1")).run_id
    other = agent_pb2.StartRunRequest(request_id="r1", text="Look", parts=[IMAGE])
    assert await reason(stub.StartRun(other, metadata=ME)) == "REQUEST_ID_REUSED"


# Defaults of a deployment are not part of a request.


@pytest.mark.parametrize("asked", [run_pb2.RunOptions(), run_pb2.RunOptions(limits=run_pb2.RunLimits())])
def test_a_request_without_limits_has_the_same_bytes_in_every_version(asked: run_pb2.RunOptions) -> None:
    """I2: job-store compares requests by their bytes, and older versions wrote no empty limits."""
    assert not wire.ASKED.write(wire.asked_options(asked)).HasField("limits")


async def think(ledger: PlayedLedger, *pieces: str) -> None:
    for piece in pieces:
        await ledger.append_event(event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(round=1, reasoning=piece)))


async def listed(stub: AgentServiceAsyncStub, page_size: int = 0) -> list[steps_pb2.Step]:
    found: list[steps_pb2.Step] = []
    token = ""
    while True:
        request = steps_pb2.ListStepsRequest(run_id="run_1", page_size=page_size, page_token=token)
        page = await stub.ListSteps(request, metadata=ME)
        found += page.steps
        token = page.next_page_token
        if not token:
            return found


async def test_steps_are_listed_during_the_run_and_after(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await think(ledger, "First ", "I look.")
    [step] = await listed(stub)
    assert (step.content, step.status) == ("First I look.", steps_pb2.STEP_STATUS_ACTIVE)
    call = call_pb2.Call(call_id="call_1", round=1, state=call_pb2.CALL_STATE_SUCCEEDED)
    await ledger.append_event(event_pb2.RunEvent(call_changed=event_pb2.CallChanged(call=call)))
    await ledger.finish()

    for page_size in (0, 1, 2):
        assert [step.step_id for step in await listed(stub, page_size)] == ["1-reasoning", "call_1", "call_1-result"]


async def test_reasoning_is_streamed_live_and_resumes_after_a_reconnect(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await think(ledger, "First ")
    stream = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id="run_1"), metadata=ME)
    first = await stream.read()
    assert isinstance(first, steps_pb2.WatchStepsResponse)
    await think(ledger, "I look.")
    second = await changed(stream)
    stream.cancel()
    assert [change.step.content for change in (*first.changes, *second.changes)] == ["First ", "I look."]
    assert second.changes[0].appends

    await think(ledger, " Then")
    again = stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id="run_1", after_seq=second.seq), metadata=ME)
    assert [(change.appends, change.step.content) for change in (await changed(again)).changes] == [(True, " Then")]
    await ledger.finish()
    assert [change.step.status for change in (await changed(again)).changes] == [steps_pb2.STEP_STATUS_STOPPED]
    assert await again.read() is grpc.aio.EOF


async def changed(stream: object) -> steps_pb2.WatchStepsResponse:
    """Return the next response that contains changes."""
    async with asyncio.timeout(60):
        while True:
            response = await stream.read()  # type: ignore[attr-defined]
            assert isinstance(response, steps_pb2.WatchStepsResponse)
            if response.changes:
                return response
