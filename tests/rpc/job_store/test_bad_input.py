"""Everything that contradicts the contract has its own reason, and changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.status import from_rpc_error
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.app.pages import make_token
from tests.rpc.job_store.user import DIGEST, User, result

CALL: dict[str, Any] = {"call_id": "call", "state": call_pb2.CALL_STATE_PROPOSED}
SUBMIT: dict[str, Any] = {"store_id": "acme", "user_id": "ann", "text": "hi", "policy": 1}
DECISION: dict[str, Any] = {"call_id": "call", "kind": call_pb2.DECISION_KIND_APPROVE, "digest": DIGEST}


async def reason(awaitable: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await awaitable
    return from_rpc_error(error.value).reason


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"store_id": ""}, "INVALID_ID"),
        ({"store_id": "a/b"}, "INVALID_ID"),
        ({"user_id": "a.b"}, "INVALID_ID"),
        ({"user_id": "x" * 65}, "INVALID_ID"),
        ({"conversation_id": "a b"}, "INVALID_ID"),
        ({"request_id": "*"}, "INVALID_ID"),
        ({"text": ""}, "INVALID_FIELD"),
        ({"policy": 0}, "INVALID_FIELD"),
        ({"policy": 99}, "INVALID_FIELD"),
        ({"conversation_id": "absent", "conversation_must_exist": True}, "CONVERSATION_NOT_FOUND"),
    ],
)
async def test_a_message(user: User, fields: dict[str, Any], wanted: str) -> None:
    assert await reason(user.ask("SubmitMessage", **SUBMIT | fields)) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"events": [event_pb2.RunEvent()]},
        {"events": [event_pb2.RunEvent(run_changed=event_pb2.RunChanged())]},
        {"events": [event_pb2.RunEvent(call_changed=event_pb2.CallChanged())]},
        {"events": [event_pb2.RunEvent(message_added=event_pb2.MessageAdded())]},
        {"events": [event_pb2.RunEvent(warning=event_pb2.Warning())] * 1001},
        {"messages": [message_pb2.Message()]},
        {"messages": [message_pb2.Message(role=message_pb2.ROLE_SUMMARY)]},
        {"messages": [message_pb2.Message(role=message_pb2.ROLE_USER, summarised_to_number=1)]},
        {"calls": [call_pb2.Call(call_id="call")]},
        {"calls": [call_pb2.Call(**(CALL | {"state": 99}))]},
        {"calls": [call_pb2.Call(**CALL), call_pb2.Call(**CALL)]},
        {"calls": [call_pb2.Call(**CALL, round=2**31)]},
        {"calls": [call_pb2.Call(**CALL, result=result())]},
        {"calls": [call_pb2.Call(**CALL, approval=call_pb2.ApprovalRequest(digest="nonsense"))]},
        {"calls": [call_pb2.Call(**(CALL | {"state": call_pb2.CALL_STATE_FAILED}))]},
        {"calls": [call_pb2.Call(**(CALL | {"state": call_pb2.CALL_STATE_AWAITING_APPROVAL}))]},
        {"state": 99},
        {"state": run_pb2.RUN_STATE_WAITING},
        {"state": run_pb2.RUN_STATE_WAITING, "waits": [99]},
        {"state": run_pb2.RUN_STATE_FAILED},
        {"lease_action": 99},
        {"lease_action": pb.LEASE_ACTION_PARK},
        {"wake_time": Timestamp(seconds=2**60)},
        {"stop_cause": 99},
    ],
)
async def test_a_step(user: User, fields: dict[str, Any]) -> None:
    owner = await user.start()
    before = await user.run(owner.run_id)
    assert (
        await reason(user.ask("CommitRun", run_id=owner.run_id, epoch=1, commit_id="next", **fields)) == "INVALID_FIELD"
    )
    assert await user.run(owner.run_id) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"store_id": "*"},
        {"run_id": ""},
        {"commit_id": ""},
        {"consumed_command_ids": ["*"]},
        {"calls": [call_pb2.Call(**(CALL | {"call_id": "a.b"}))]},
    ],
)
async def test_ids_of_a_step(user: User, fields: dict[str, Any]) -> None:
    step: dict[str, Any] = {"store_id": "acme", "run_id": "r", "epoch": 1, "commit_id": "c"}
    assert await reason(user.ask("CommitRun", **step | fields)) == "INVALID_ID"


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"tool_result": pb.ToolResultCommand(call_id="call")},
        {"decision": pb.DecisionCommand(**(DECISION | {"kind": 0}))},
        {"decision": pb.DecisionCommand(**(DECISION | {"kind": call_pb2.DECISION_KIND_EDIT}))},
        {
            "decision": pb.DecisionCommand(
                **(DECISION | {"kind": call_pb2.DECISION_KIND_EDIT, "arguments_json": b"{}", "edited_digest": "x"})
            )
        },
        {"decision": pb.DecisionCommand(**(DECISION | {"kind": call_pb2.DECISION_KIND_ANSWER}))},
        {"steer": pb.SteerCommand()},
        {"cancel": pb.CancelCommand()},
        {"resolve": pb.ResolveCommand(call_id="call")},
        {"resolve": pb.ResolveCommand(call_id="call", resolution=pb.CALL_RESOLUTION_HAPPENED)},
        {"resolve": pb.ResolveCommand(call_id="call", resolution=pb.CALL_RESOLUTION_RUN_AGAIN, content_json=b"1")},
        {"progress": pb.ProgressCommand(call_id="call", client_id="tab", fraction=1.5)},
    ],
)
async def test_a_command(user: User, kind: dict[str, Any]) -> None:
    assert (
        await reason(user.ask("SendCommand", run_id="run", command=pb.Command(command_id="cmd", **kind)))
        == "INVALID_FIELD"
    )


async def test_page_tokens_belong_to_their_method_and_filter(user: User) -> None:
    for _ in range(3):
        await user.submit(conversation_id="c1")
    token = (await user.ask("ListRuns", page_size=1)).next_page_token
    assert token
    wrong = [
        user.ask("ListRuns", user_id="bob", page_token=token),
        user.ask("ListRuns", store_id="globex", page_token=token),
        user.ask("ListRuns", conversation_id="c1", page_token=token),
        user.ask("ListPendingCalls", page_token=token),
        user.ask("ListRuns", page_token=token[:-1]),
        user.ask("ListRuns", page_token="¿"),
    ]
    assert [await reason(call) for call in wrong] == ["INVALID_PAGE_TOKEN"] * len(wrong)
    assert await reason(user.ask("ListRuns", page_size=201)) == "INVALID_FIELD"


async def test_text_that_the_database_cannot_hold_as_text_is_kept_byte_for_byte(user: User) -> None:
    """I20: a NUL from a model or a tool must not stop the ledger."""
    text = "before\0after"
    owner = await user.start(text)
    await owner.commit(
        messages=[message_pb2.Message(role=message_pb2.ROLE_ASSISTANT, text=text)],
        calls=[owner.call("call", call_pb2.CALL_STATE_FAILED, tool_name=text, result=result(text))],
        output_text=text,
        failure=run_pb2.RunFailure(message=text),
    )
    await user.decide(owner.run_id, "call", call_pb2.DECISION_KIND_REJECT, reason=text)
    loaded = await owner.load()
    assert [message.text for message in loaded.messages] == [text, text]
    assert (loaded.calls[0].tool_name, loaded.run.output_text, loaded.run.failure.message) == (text, text, text)


async def test_a_page_token_cannot_carry_to_the_database_what_no_row_has(user: User) -> None:
    """Whoever makes tokens himself, with the right seal, is refused as well."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    run_id = (await user.submit(conversation_id="c1")).run.run_id
    runs = make_token("ListRuns", ("acme", "ann", "", ()), (began, "a\0b"))
    calls = make_token("ListCalls", ("acme", "ann", run_id), (2**40, 0, "x"))
    pending = make_token("ListPendingCalls", ("acme", "ann"), (began, "x" * 65))
    messages = make_token("ListMessages", ("acme", "ann", "c1"), (2**63,))
    me: dict[str, Any] = {"store_id": "acme", "user_id": "ann"}
    wrong = [
        user.ask("ListRuns", **me, page_token=runs),
        user.ask("ListCalls", **me, run_id=run_id, page_token=calls),
        user.ask("ListPendingCalls", **me, page_token=pending),
        user.ask("ListMessages", **me, conversation_id="c1", page_token=messages),
    ]
    assert [await reason(call) for call in wrong] == ["INVALID_PAGE_TOKEN"] * len(wrong)
