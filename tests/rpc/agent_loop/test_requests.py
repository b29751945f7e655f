"""Unary methods: what goes through, and each way in which a request is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.agent_loop.app.public_values import DecisionCommand, DecisionRight, ResultCommand
from pawl.agent_loop.domain.call import DecisionKind
from pawl.agent_loop.domain.run import RunState
from pawl.chassis.ids import CallId
from pawl.chassis.rpc_server import RpcServer
from pawl.errors import InvalidArguments, InvalidField
from pawl.event.v1 import call_pb2, run_pb2
from tests.fakes.live_events import FakeLive
from tests.rpc.agent_loop.conftest import APPROVER, ME, OPERATOR, STRANGERS
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

MISSING = "no-such"
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


async def test_the_same_request_id_gives_the_same_run(stub: AgentServiceAsyncStub) -> None:
    """I2"""
    request = agent_pb2.StartRunRequest(request_id="r1", text="Hello")
    first, second = [await stub.StartRun(request, metadata=ME) for _ in range(2)]
    assert first.run.run_id == second.run.run_id
    other = agent_pb2.StartRunRequest(request_id="r1", text="Bye")
    assert await reason(stub.StartRun(other, metadata=ME)) == "REQUEST_ID_REUSED"


Build = Callable[[], agent_pb2.StartRunRequest]


def start(text: str = "Hello", **fields: Any) -> agent_pb2.StartRunRequest:
    return agent_pb2.StartRunRequest(text=text, **fields)


def options(**fields: Any) -> agent_pb2.StartRunRequest:
    return start(options=run_pb2.RunOptions(**fields))


def limits(**fields: Any) -> agent_pb2.StartRunRequest:
    return options(limits=run_pb2.RunLimits(**fields))


def choice(mode: run_pb2.ToolChoice.Mode.ValueType, name: str = "", **fields: Any) -> agent_pb2.StartRunRequest:
    return options(tool_choice=run_pb2.ToolChoice(mode=mode, tool_name=name), **fields)


@pytest.mark.parametrize(
    ("request_", "expected", "field"),
    [
        (start(""), "INVALID_FIELD", "text"),
        (start("bell\a"), "INVALID_FIELD", "text"),
        (start("nul\0"), "INVALID_FIELD", "text"),
        (start("next line\x85"), "INVALID_FIELD", "text"),
        (start("x" * (256 * 1024 + 1)), "TOO_LARGE", "text"),
        (start(request_id="no spaces"), "INVALID_ID", "request_id"),
        (start(conversation_id="../etc"), "INVALID_ID", "conversation_id"),
        (start(conversation_id="x" * 65), "INVALID_ID", "conversation_id"),
        (start(policy=types_pb2.MESSAGE_POLICY_STEER), "INVALID_FIELD", "policy"),
        (start(policy=99), "INVALID_FIELD", "policy"),
        (limits(rounds_max=1001), "INVALID_FIELD", "options.limits.rounds_max"),
        (limits(rounds_max=0), "INVALID_FIELD", "options.limits.rounds_max"),
        (limits(run_timeout_seconds=float("nan")), "INVALID_FIELD", "options.limits.run_timeout_seconds"),
        (limits(run_timeout_seconds=-1), "INVALID_FIELD", "options.limits.run_timeout_seconds"),
        (limits(approval_expiry_seconds=30 * 86_400 + 1), "INVALID_FIELD", "options.limits.approval_expiry_seconds"),
        (options(temperature=2.1), "INVALID_FIELD", "options.temperature"),
        (options(temperature=float("nan")), "INVALID_FIELD", "options.temperature"),
        (options(output_tokens_max=0), "INVALID_FIELD", "options.output_tokens_max"),
        (options(instructions="x" * (64 * 1024 + 1)), "TOO_LARGE", "options.instructions"),
        (options(instructions="nul\0"), "INVALID_FIELD", "options.instructions"),
        (options(model="nul\0"), "INVALID_FIELD", "options.model"),
        (options(tool_names=[""]), "INVALID_FIELD", "options.tool_names"),
        (options(batch_order=77), "INVALID_FIELD", "options.batch_order"),
        (options(round_limit_policy=77), "INVALID_FIELD", "options.round_limit_policy"),
        (options(unknown_outcome_policy=77), "INVALID_FIELD", "options.unknown_outcome_policy"),
        (choice(run_pb2.ToolChoice.MODE_TOOL), "INVALID_FIELD", "options.tool_choice.tool_name"),
        (choice(run_pb2.ToolChoice.MODE_AUTO, "f"), "INVALID_FIELD", "options.tool_choice.tool_name"),
        (choice(run_pb2.ToolChoice.MODE_TOOL, "f", tool_names=["g"]), "INVALID_FIELD", "options.tool_choice.tool_name"),
        (
            choice(run_pb2.ToolChoice.MODE_REQUIRED, without_tools=True),
            "INVALID_FIELD",
            "options.tool_choice.mode",
        ),
        (start(conversation_id=MISSING), "CONVERSATION_NOT_FOUND", None),
    ],
)
async def test_a_bad_message_is_refused_with_the_field_that_is_wrong(
    stub: AgentServiceAsyncStub, request_: agent_pb2.StartRunRequest, expected: str, field: str | None
) -> None:
    """LOOP-15"""
    error = await failure(stub.StartRun(request_, metadata=ME))
    assert error.reason == expected
    assert error.metadata.get("field") == field


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


async def test_a_message_needs_a_conversation(stub: AgentServiceAsyncStub) -> None:
    assert await reason(stub.SendMessage(agent_pb2.SendMessageRequest(text="x"), metadata=ME)) == "INVALID_ID"
    request = agent_pb2.SendMessageRequest(conversation_id=MISSING, text="x")
    assert await reason(stub.SendMessage(request, metadata=ME)) == "CONVERSATION_NOT_FOUND"


def calls_on(stub: AgentServiceAsyncStub, run_id: str, call_id: str) -> list[Any]:
    """Every method that names a run or a call, with an otherwise good request."""
    decision = types_pb2.CallDecision(
        call_id=call_id, kind=call_pb2.DECISION_KIND_EDIT, digest=DIGEST, arguments_json=b"{}"
    )
    return [
        (stub.GetRun, agent_pb2.GetRunRequest(run_id=run_id)),
        (stub.CancelRun, agent_pb2.CancelRunRequest(run_id=run_id)),
        (stub.ListCalls, agent_pb2.ListCallsRequest(run_id=run_id)),
        (stub.Decide, agent_pb2.DecideRequest(run_id=run_id, decision=decision)),
        (
            stub.SubmitToolResults,
            agent_pb2.SubmitToolResultsRequest(
                run_id=run_id, results=[types_pb2.ToolResult(call_id=call_id, content_json=b"1")]
            ),
        ),
    ]


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_what_belongs_to_others_looks_exactly_like_nothing(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, stranger: Any
) -> None:
    """I13: not found, with the same words as for an id that does not exist."""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    foreign = [
        await failure(method(request, metadata=stranger)) for method, request in calls_on(stub, "run_1", "call_1")
    ]
    absent = [await failure(method(request, metadata=stranger)) for method, request in calls_on(stub, MISSING, MISSING)]
    assert [(each.reason, each.message) for each in foreign] == [(each.reason, each.message) for each in absent]
    assert {each.kind.value for each in foreign} == {"NOT_FOUND"}
    assert not (await stub.ListRuns(agent_pb2.ListRunsRequest(), metadata=stranger)).runs
    assert not (await stub.ListPending(agent_pb2.ListPendingRequest(), metadata=stranger)).calls


@pytest.mark.parametrize("run_id", ["", "a b", "x" * 65, "*", "é"])
async def test_ids_of_another_form_are_refused(stub: AgentServiceAsyncStub, run_id: str) -> None:
    for method, request in calls_on(stub, run_id, "call_1"):
        assert await reason(method(request, metadata=ME)) == "INVALID_ID"
    stream = stub.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id), metadata=ME)
    assert await reason(stream.read()) == "INVALID_ID"


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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "INVALID_JSON"),
        (b'{"a":1,"a":2}', "INVALID_JSON"),
        (b"NaN", "INVALID_JSON"),
        (b"[" * 40 + b"]" * 40, "INVALID_JSON"),
        (b'"\\u0000"', "INVALID_JSON"),
        (b'"\xff"', "INVALID_JSON"),
        (b'"' + b"x" * (1024 * 1024) + b'"', "TOO_LARGE"),
    ],
)
async def test_a_result_that_is_not_strict_json_is_refused(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, content: bytes, expected: str
) -> None:
    await ledger.add_run()
    await ledger.offer("call_1")
    request = agent_pb2.SubmitToolResultsRequest(
        run_id="run_1", results=[types_pb2.ToolResult(call_id="call_1", content_json=content)]
    )
    (receipt,) = (await stub.SubmitToolResults(request, metadata=ME)).receipts
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, expected)
    assert not ledger.commands


@pytest.mark.parametrize("count", [0, 65])
async def test_1_to_64_results_come_at_once(stub: AgentServiceAsyncStub, ledger: PlayedLedger, count: int) -> None:
    await ledger.add_run()
    results = [types_pb2.ToolResult(call_id=f"call_{number}", content_json=b"1") for number in range(count)]
    request = agent_pb2.SubmitToolResultsRequest(run_id="run_1", results=results)
    assert await reason(stub.SubmitToolResults(request, metadata=ME)) == "INVALID_FIELD"


async def test_a_result_of_another_run_than_the_requests_is_refused(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run()
    result = types_pb2.ToolResult(run_id="run_2", call_id="call_1", content_json=b"1")
    request = agent_pb2.SubmitToolResultsRequest(run_id="run_1", results=[result])
    error = await failure(stub.SubmitToolResults(request, metadata=ME))
    assert isinstance(error, InvalidField)
    assert error.metadata["field"] == "tool_result.run_id"


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


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (decide(), "INVALID_FIELD"),
        (decide(kind=99), "INVALID_FIELD"),
        (decide(kind=APPROVE, digest=""), "DIGEST_REQUIRED"),
        (decide(kind=APPROVE, digest="another"), "DIGEST_MISMATCH"),
        (decide(kind=APPROVE, digest="x" * 129), "TOO_LARGE"),
        (decide(kind=APPROVE, arguments_json=b"{}"), "INVALID_FIELD"),
        (decide(kind=APPROVE, answer="yes"), "INVALID_FIELD"),
        (decide(kind=EDIT), "INVALID_JSON"),
        (decide(kind=EDIT, arguments_json=b"[1]"), "INVALID_JSON"),
        (decide(kind=EDIT, arguments_json=b'{"a":1,"a":1}'), "INVALID_JSON"),
        (decide(kind=EDIT, arguments_json=b'"' + b"x" * (256 * 1024) + b'"'), "TOO_LARGE"),
        (decide(kind=EDIT, arguments_json=b"{}", call_id=MISSING), "CALL_NOT_FOUND"),
        (decide(kind=REJECT, reason="x" * 4097), "TOO_LARGE"),
        (decide(kind=REJECT, reason="bell\a"), "INVALID_FIELD"),
        (decide(kind=ANSWER), "INVALID_FIELD"),
        (decide(kind=ANSWER, answer="x" * (64 * 1024 + 1)), "TOO_LARGE"),
        (decide(kind=APPROVE, call_id=MISSING), "CALL_NOT_FOUND"),
        (decide(kind=APPROVE, call_id="a b"), "INVALID_ID"),
    ],
)
async def test_a_bad_decision_changes_nothing(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, request_: agent_pb2.DecideRequest, expected: str
) -> None:
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    assert await reason(stub.Decide(request_, metadata=APPROVER)) == expected
    assert ledger.runs["run_1"].calls["call_1"].state == call_pb2.CALL_STATE_AWAITING_APPROVAL


async def test_an_edit_of_a_call_of_another_run_is_not_found(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.add_run("run_2")
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="run_2")
    assert await reason(stub.Decide(decide(kind=EDIT, arguments_json=b"{}"), metadata=ME)) == "CALL_NOT_FOUND"


async def test_a_decision_about_a_run_that_ended_is_too_late(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    await ledger.finish()
    assert await reason(stub.Decide(decide(kind=APPROVE), metadata=ME)) == "CALL_NOT_PENDING"


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


def resolve(resolution: agent_pb2.Resolution.ValueType, content: bytes = b"") -> agent_pb2.ResolveCallRequest:
    return agent_pb2.ResolveCallRequest(run_id="run_1", call_id="call_1", resolution=resolution, content_json=content)


@pytest.mark.parametrize(
    ("request_", "metadata", "expected"),
    [
        (resolve(agent_pb2.RESOLUTION_HAPPENED, b"1"), ME, "PERMISSION_DENIED"),
        (resolve(agent_pb2.RESOLUTION_UNSPECIFIED), OPERATOR, "INVALID_FIELD"),
        (resolve(agent_pb2.RESOLUTION_HAPPENED), OPERATOR, "INVALID_JSON"),
        (resolve(agent_pb2.RESOLUTION_RUN_AGAIN, b"1"), OPERATOR, "INVALID_FIELD"),
        (resolve(agent_pb2.RESOLUTION_TELL_MODEL), OPERATOR, "CALL_NOT_FOUND"),
    ],
)
async def test_only_an_operator_says_what_became_of_a_call(
    stub: AgentServiceAsyncStub,
    ledger: PlayedLedger,
    request_: agent_pb2.ResolveCallRequest,
    metadata: Any,
    expected: str,
) -> None:
    await ledger.add_run()
    assert await reason(stub.ResolveCall(request_, metadata=metadata)) == expected


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


@pytest.mark.parametrize("seconds", [-1, 60.1, float("nan"), float("inf")])
async def test_nobody_waits_for_longer_than_a_minute(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, seconds: float
) -> None:
    await ledger.add_run()
    request = agent_pb2.GetRunRequest(run_id="run_1", wait_seconds=seconds)
    assert await reason(stub.GetRun(request, metadata=ME)) == "INVALID_FIELD"


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


@pytest.mark.parametrize("fields", [{"page_size": 201}, {"page_token": "made up"}])
async def test_bad_pages_are_refused(stub: AgentServiceAsyncStub, ledger: PlayedLedger, fields: Any) -> None:
    await ledger.add_run()
    expected = "INVALID_FIELD" if "page_size" in fields else "INVALID_PAGE_TOKEN"
    calls: list[Any] = [
        stub.ListRuns(agent_pb2.ListRunsRequest(**fields), metadata=ME),
        stub.ListPending(agent_pb2.ListPendingRequest(**fields), metadata=ME),
        stub.ListCalls(agent_pb2.ListCallsRequest(run_id="run_1", **fields), metadata=ME),
        stub.ListMessages(agent_pb2.ListMessagesRequest(conversation_id="conv_1", **fields), metadata=ME),
    ]
    for call in calls:
        assert await reason(call) == expected


async def test_an_unknown_state_in_a_filter_is_refused(stub: AgentServiceAsyncStub) -> None:
    for state in (0, 99):
        request = agent_pb2.ListRunsRequest(states=[state])  # type: ignore[list-item]
        assert await reason(stub.ListRuns(request, metadata=ME)) == "INVALID_FIELD"


async def test_a_ledger_that_is_away_is_unavailable(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run()
    ledger.down = True
    for method, request in calls_on(stub, "run_1", "call_1"):
        assert await reason(method(request, metadata=ME)) == "DEPENDENCY_UNAVAILABLE"


async def test_bytes_that_are_no_message_are_refused(server: RpcServer) -> None:
    async with grpc.aio.insecure_channel(server.address) as channel:
        for name in ("StartRun", "SubmitToolResults", "Decide", "GetRun"):
            method: Any = channel.unary_unary(f"/pawl.agent.v1.AgentService/{name}")
            assert await reason(method(b"\xff\xff\xff", metadata=ME)) == "MALFORMED_REQUEST"


async def test_nobody_gets_in_without_a_key(stub: AgentServiceAsyncStub) -> None:
    assert await reason(stub.ListRuns(agent_pb2.ListRunsRequest())) == "UNAUTHENTICATED"
