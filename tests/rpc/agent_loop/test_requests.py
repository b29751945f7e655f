"""Unary methods: what goes through, and each way in which a request is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.agent_loop.app.public_values import DecisionCommand, DecisionRight, ResultCommand
from pawl.agent_loop.domain.call import DecisionKind
from pawl.agent_loop.domain.run import RunState
from pawl.chassis.ids import CallId
from pawl.errors import InvalidArguments
from pawl.event.v1 import call_pb2, run_pb2
from tests.fakes.live_events import FakeLive
from tests.rpc.agent_loop.conftest import APPROVER, ME
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

DIGEST = "digest of call_1"


async def test_a_run_is_created_with_complete_options(stub: AgentServiceAsyncStub) -> None:
    """LOOP-1, and limits that are below the default, and above it."""
    limits = run_pb2.RunLimits(rounds_max=3, tool_timeout_seconds=60)
    options = run_pb2.RunOptions(limits=limits, temperature=0.0)
    response = await stub.StartRun(agent_pb2.StartRunRequest(text="Hello\n\tyou", options=options), metadata=ME)
    assert response.run.user_id == "me"
    kept = response.run.options
    assert (kept.model, kept.instructions) == ("the-model", "Be brief.")
    assert (kept.limits.rounds_max, kept.limits.run_timeout_seconds) == (3, 300.0)
    assert (kept.limits.tool_timeout_seconds, kept.limits.tool_timeout_seconds_max) == (60, 100)
    assert kept.HasField("temperature")
    assert not kept.HasField("output_tokens_max")
    assert kept.batch_order == run_pb2.BATCH_ORDER_WAIT_FOR_DECISIONS
    assert kept.limits.ListFields()[-1][0].name == "agent_depth_max"
    assert len(kept.limits.ListFields()) == len(run_pb2.RunLimits.DESCRIPTOR.fields)


async def test_a_busy_conversation_refuses_where_that_was_asked(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    request = agent_pb2.SendMessageRequest(
        conversation_id="conv_1", text="Hello", policy=types_pb2.MESSAGE_POLICY_REJECT
    )
    assert await reason(stub.SendMessage(request, metadata=ME)) == "CONVERSATION_BUSY"
    steer = agent_pb2.SendMessageRequest(conversation_id="conv_1", text="Hello", policy=types_pb2.MESSAGE_POLICY_STEER)
    assert (await stub.SendMessage(steer, metadata=ME)).steered


async def test_results_get_a_receipt_each_and_a_bad_one_does_not_stop_the_others(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """FE-3, I11"""
    await ledger.add_run()
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
    assert ResultCommand(call_id=CallId("call_1"), content_json=b'{"ok": true}', is_error=True) in ledger.commands
    again = await stub.SubmitToolResults(request, metadata=ME)
    assert again.receipts[0].status == types_pb2.RECEIPT_STATUS_DUPLICATE


def decide(request_id: str = "", call_id: str = "call_1", **fields: Any) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(**{"call_id": call_id, "digest": DIGEST, **fields})
    return agent_pb2.DecideRequest(request_id=request_id, run_id="run_1", decision=decision)


APPROVE = call_pb2.DECISION_KIND_APPROVE
EDIT = call_pb2.DECISION_KIND_EDIT
REJECT = call_pb2.DECISION_KIND_REJECT
ANSWER = call_pb2.DECISION_KIND_ANSWER


async def test_a_decision_is_taken_once(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """HITL-3, I9"""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    request = decide("r1", kind=APPROVE)
    first = await stub.Decide(request, metadata=APPROVER)
    assert first.receipt.status == types_pb2.RECEIPT_STATUS_ACCEPTED
    assert not first.run.pending_calls
    again = await stub.Decide(request, metadata=APPROVER)
    assert again.receipt.status == types_pb2.RECEIPT_STATUS_DUPLICATE
    assert await reason(stub.Decide(decide("r2", kind=REJECT), metadata=APPROVER)) == "ALREADY_DECIDED"
    assert await reason(stub.Decide(decide("r1", kind=REJECT), metadata=APPROVER)) == "REQUEST_ID_REUSED"


async def test_an_answer_that_does_not_fit_is_refused_and_the_question_stays_open(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    question = call_pb2.Question(answer_schema_json=b'{"type":"object"}')
    await ledger.add_call("call_1", call_pb2.CALL_STATE_ASKED, spec=call_pb2.Call(question=question))
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    error = await failure(stub.Decide(decide(kind=ANSWER, digest="", answer="bad"), metadata=ME))
    assert isinstance(error, InvalidArguments)
    assert error.message == "the answer does not fit: it must be a number"
    both = [
        types_pb2.CallDecision(run_id="run_1", call_id=call_id, kind=ANSWER, answer="bad")
        for call_id in ("call_1", "call_2")
    ]
    first, second = (await stub.DecideCalls(agent_pb2.DecideCallsRequest(decisions=both), metadata=ME)).receipts
    assert (first.status, first.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_ARGUMENTS")
    assert second.status == types_pb2.RECEIPT_STATUS_ACCEPTED, "any answer will do"
    assert len(ledger.commands) == 1


async def test_edited_arguments_are_checked_and_made_canonical(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """HITL-3: an edit is validated and re-checked before it is taken, and gets a digest of its own."""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    error = await failure(stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "bad"}'), metadata=APPROVER))
    assert isinstance(error, InvalidArguments)
    assert error.message == "to: not an address; subject: missing"
    assert not ledger.commands
    await stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "ann"}', reason="typo"), metadata=APPROVER)
    edited = DecisionCommand(
        call_id=CallId("call_1"),
        kind=DecisionKind.EDIT,
        digest=DIGEST,
        arguments_json=b'{"to":"ann"}',
        edited_digest="ef" * 32,
        reason="typo",
        answer="",
        right=DecisionRight.STORE,
    )
    assert ledger.commands == [edited]


async def test_cancelling_again_or_too_late_shows_the_run_as_it_is(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """I12, EVT-4"""
    await ledger.add_run()
    request = agent_pb2.CancelRunRequest(request_id="r1", run_id="run_1", reason="enough")
    assert (await stub.CancelRun(request, metadata=ME)).run.state == run_pb2.RUN_STATE_CANCELLING
    assert (await stub.CancelRun(request, metadata=ME)).run.state == run_pb2.RUN_STATE_CANCELLING
    await ledger.finish()
    late = agent_pb2.CancelRunRequest(run_id="run_1")
    assert (await stub.CancelRun(late, metadata=ME)).run.state == run_pb2.RUN_STATE_COMPLETED


async def test_getting_a_run_waits_until_it_rests(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive
) -> None:
    """FE-3: one call, no polling by the client."""
    await ledger.add_run()
    waiting = asyncio.ensure_future(stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=60), metadata=ME))
    while not live.subscriber_count:
        await asyncio.sleep(0)
    await ledger.append(count=3)
    assert not waiting.done()
    await ledger.offer("call_1")
    await ledger.change("run_1", RunState.WAITING)
    run = (await waiting).run
    assert run.state == run_pb2.RUN_STATE_WAITING
    assert [call.call_id for call in run.pending_calls] == ["call_1"]
    while live.subscriber_count:
        await asyncio.sleep(0)


async def test_getting_a_run_waits_no_longer_than_asked(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    response = await stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=0.05), metadata=ME)
    assert response.run.state == run_pb2.RUN_STATE_QUEUED


async def test_lists_pass_through(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.add_run("run_2")
    await ledger.offer("call_1")
    await ledger.finish("run_2")
    completed = agent_pb2.ListRunsRequest(states=[run_pb2.RUN_STATE_COMPLETED])
    assert [run.run_id for run in (await stub.ListRuns(completed, metadata=ME)).runs] == ["run_2"]
    calls = await stub.ListCalls(agent_pb2.ListCallsRequest(run_id="run_1"), metadata=ME)
    assert [call.call_id for call in calls.calls] == ["call_1"]
    pending = await stub.ListPending(agent_pb2.ListPendingRequest(), metadata=ME)
    assert [call.call_id for call in pending.calls] == ["call_1"]
    run = (await stub.StartRun(agent_pb2.StartRunRequest(text="Hello"), metadata=ME)).run
    request = agent_pb2.ListMessagesRequest(conversation_id=run.conversation_id)
    messages = await stub.ListMessages(request, metadata=ME)
    assert [message.text for message in messages.messages] == ["Hello"]
