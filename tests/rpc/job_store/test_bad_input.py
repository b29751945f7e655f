"""Each invalid request is refused with its own reason and changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.errors import (
    ConversationNotFound,
    InvalidField,
    InvalidId,
    InvalidPageToken,
    PawlError,
    RequestIdReused,
    TooLarge,
)
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.pages import make_token
from tests.rpc.job_store.user import DIGEST, Owner, User, result
from tests.rpc.refusals import raises

IMAGE = message_pb2.Part(image=message_pb2.ImagePart(data=b"x", media_type="image/png", size_bytes=1))
CALL: dict[str, Any] = {"call_id": "call", "state": call_pb2.CALL_STATE_PROPOSED}
SUBMIT: dict[str, Any] = {"store_id": "acme", "user_id": "ann", "text": "hi", "policy": 1}
DECISION: dict[str, Any] = {"call_id": "call", "kind": call_pb2.DECISION_KIND_APPROVE, "digest": DIGEST}


MESSAGES: list[tuple[dict[str, Any], type[PawlError]]] = [
    ({"store_id": ""}, InvalidId),
    ({"store_id": "a/b"}, InvalidId),
    ({"user_id": "a.b"}, InvalidId),
    ({"user_id": "x" * 65}, InvalidId),
    ({"conversation_id": "a b"}, InvalidId),
    ({"request_id": "*"}, InvalidId),
    ({"text": ""}, InvalidField),
    ({"policy": 0}, InvalidField),
    ({"policy": 99}, InvalidField),
    ({"conversation_id": "absent", "conversation_must_exist": True}, ConversationNotFound),
    ({"conversation_key": "x" * 201}, TooLarge),
    ({"conversation_key": "k", "conversation_id": "c1"}, InvalidField),
    ({"labels": {"pawl.x": ""}}, InvalidField),
    ({"labels": {f"k{number}": "" for number in range(17)}}, InvalidField),
    ({"parts": [IMAGE]}, InvalidField),
    ({"text": "", "parts": [IMAGE], "policy": ledger_pb2.MESSAGE_POLICY_STEER}, InvalidField),
]
STEPS: list[dict[str, Any]] = [
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
    {"lease_action": ledger_pb2.LEASE_ACTION_PARK},
    {"wake_time": Timestamp(seconds=2**60)},
    {"stop_cause": 99},
    {"delegations": [ledger_pb2.Delegation(call_id="call", run_id="run_b")]},
    {"usage": run_pb2.Usage(input_tokens=2**53 + 1)},
]
STEP_IDS: list[dict[str, Any]] = [
    {"store_id": "*"},
    {"run_id": ""},
    {"commit_id": ""},
    {"consumed_command_ids": ["*"]},
    {"calls": [call_pb2.Call(**(CALL | {"call_id": "a.b"}))]},
]
COMMANDS: list[dict[str, Any]] = [
    {},
    {"tool_result": ledger_pb2.ToolResultCommand(call_id="call")},
    {"decision": ledger_pb2.DecisionCommand(**(DECISION | {"kind": 0}))},
    {"decision": ledger_pb2.DecisionCommand(**(DECISION | {"kind": call_pb2.DECISION_KIND_EDIT}))},
    {
        "decision": ledger_pb2.DecisionCommand(
            **(DECISION | {"kind": call_pb2.DECISION_KIND_EDIT, "arguments_json": b"{}", "edited_digest": "x"})
        )
    },
    {"decision": ledger_pb2.DecisionCommand(**(DECISION | {"kind": call_pb2.DECISION_KIND_ANSWER}))},
    {"steer": ledger_pb2.SteerCommand()},
    {"cancel": ledger_pb2.CancelCommand()},
    {"resolve": ledger_pb2.ResolveCommand(call_id="call")},
    {"resolve": ledger_pb2.ResolveCommand(call_id="call", resolution=ledger_pb2.CALL_RESOLUTION_HAPPENED)},
    {
        "resolve": ledger_pb2.ResolveCommand(
            call_id="call", resolution=ledger_pb2.CALL_RESOLUTION_RUN_AGAIN, content_json=b"1"
        )
    },
    {"progress": ledger_pb2.ProgressCommand(call_id="call", client_id="tab", fraction=1.5)},
]


async def refused(user: User, method: str, error: type[PawlError], **fields: Any) -> None:
    await raises(error, user.ask(method, **fields))


async def test_a_contract_violation_returns_its_reason_and_has_no_effect(user: User, owner: Owner) -> None:
    before = await user.run(owner.run_id)
    for fields, error in MESSAGES:
        await refused(user, "SubmitMessage", error, **SUBMIT | fields)
    step: dict[str, Any] = {"run_id": owner.run_id, "epoch": 1, "commit_id": "next"}
    for fields in STEPS:
        await refused(user, "CommitRun", InvalidField, **step | fields)
    for fields in STEP_IDS:
        await refused(user, "CommitRun", InvalidId, **step | fields)
    for fields in COMMANDS:
        command = ledger_pb2.Command(command_id="cmd", **fields)
        await refused(user, "SendCommand", InvalidField, run_id=owner.run_id, command=command)
    for runs_max, seconds in ((0, 30), (65, 30), (1, 0.5), (1, 301), (1, float("nan"))):
        await refused(user, "ClaimRuns", InvalidField, worker_id="w", runs_max=runs_max, lease_seconds=seconds)
    for fields in ({"waits": [99]}, {"waits": [1], "states": [1]}, {"labels": {"": "x"}}, {"page_size": 201}):
        await refused(user, "ListRuns", InvalidField, **fields)
    assert (await user.run(owner.run_id), len((await user.ask("ListRuns")).runs)) == (before, 1)


async def test_page_token_works_only_with_its_method_filter_and_columns(user: User) -> None:
    """Tokens forged with a valid seal are rejected too."""
    run_id, *_ = [(await user.submit(conversation_id="c1")).run.run_id for _ in range(3)]
    token = (await user.ask("ListRuns", page_size=1)).next_page_token
    await user.submit(conversation_id="c2")
    conversations = (await user.ask("ListConversations", page_size=1)).next_page_token
    began = datetime(2026, 1, 1, tzinfo=UTC)
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("ListRuns", {"user_id": "bob"}, token),
        ("ListRuns", {"store_id": "globex"}, token),
        ("ListRuns", {"conversation_id": "c1"}, token),
        ("ListPendingCalls", {}, token),
        ("ListRuns", {}, token[:-1]),
        ("ListRuns", {}, "¿"),
        ("ListConversations", {"archived": False}, conversations),
        ("ListRuns", {}, make_token("ListRuns", ("acme", "ann", "", ()), (began, "a\0b"))),
        ("ListCalls", {"run_id": run_id}, make_token("ListCalls", ("acme", "ann", run_id), (2**40, 0, "x"))),
        ("ListPendingCalls", {}, make_token("ListPendingCalls", ("acme", "ann"), (began, "x" * 65))),
        ("ListMessages", {"conversation_id": "c1"}, make_token("ListMessages", ("acme", "ann", "c1"), (2**63,))),
    ]
    for method, fields, page_token in wrong:
        await refused(user, method, InvalidPageToken, **fields, page_token=page_token)


async def test_text_unsupported_by_the_database_is_stored_byte_for_byte(user: User) -> None:
    """I20: a NUL from a model or a tool must not break the ledger."""
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


async def test_request_identity_does_not_depend_on_deployment_defaults(user: User) -> None:
    """I2: a request that is repeated after a deploy with other defaults is the same request."""
    asked = run_pb2.RunOptions(limits=run_pb2.RunLimits(rounds_max=3))
    old, new = run_pb2.RunOptions(model="old"), run_pb2.RunOptions(model="new")
    first = await user.submit(request_id="r1", options=old, asked_options=asked)
    again = await user.submit(request_id="r1", options=new, asked_options=asked)
    assert (again.run.run_id, again.run.options.model) == (first.run.run_id, "old")
    await raises(RequestIdReused, user.submit(request_id="r1", options=old, asked_options=run_pb2.RunOptions()))
