"""WhoAmI: the identity of the caller and the features of the deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, operator_pb2, session_pb2, types_pb2
from pawl.agent.v1 import whoami_pb2 as pb
from pawl.agent_loop.api.whoami import caller_info
from pawl.chassis.identity.auth import service_principal, user_principal
from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from tests.fakes.unknown_values import calls_by_method, code_of
from tests.rpc.agent_loop.client import Client
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, DELEGATE, ME, OPERATOR
from tests.rpc.agent_loop.errors import failure
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


async def ask(stub: AgentServiceAsyncStub, metadata: Any) -> pb.WhoAmIResponse:
    return await stub.WhoAmI(pb.WhoAmIRequest(), metadata=metadata)


async def test_whoami_returns_the_caller(stub: AgentServiceAsyncStub) -> None:
    caller = (await ask(stub, ME)).caller
    assert (caller.store_id, caller.user_id, list(caller.roles)) == ("local", "me", ["member"])
    assert caller.credential_id.startswith("file-")
    assert not caller.HasField("expire_time")
    assert "/pawl.agent.v1.AgentService/StartRun" in caller.methods
    assert "/pawl.agent.v1.OperatorService/EndRun" not in caller.methods


@pytest.mark.parametrize(
    ("metadata", "right"),
    [
        (ME, pb.DECISION_RIGHT_QUESTIONS),
        (OPERATOR, pb.DECISION_RIGHT_QUESTIONS),
        (APPROVER, pb.DECISION_RIGHT_STORE),
        (ADMIN, pb.DECISION_RIGHT_STORE),
        (DELEGATE, pb.DECISION_RIGHT_UNSPECIFIED),
    ],
)
async def test_whoami_returns_what_the_caller_may_decide(
    stub: AgentServiceAsyncStub, metadata: Any, right: int
) -> None:
    """HITL-4: the right depends on the roles of the caller."""
    assert (await ask(stub, metadata)).caller.decision_right == right


async def test_whoami_returns_the_features_of_the_deployment(stub: AgentServiceAsyncStub) -> None:
    offer = (await ask(stub, ME)).deployment
    assert (offer.model, offer.approvals_required, offer.tool_count) == ("the-model", 1, 7)
    assert list(offer.agent_names) == ["default"]
    assert offer.version
    assert (offer.limits.rounds_max, offer.ceilings.rounds_max) == (10, 1000)
    names = {field.name for field in offer.limits.DESCRIPTOR.fields}
    for limits in (offer.limits, offer.ceilings):
        assert {field.name for field, _ in limits.ListFields()} == names


def test_whoami_lists_exactly_the_methods_that_the_caller_may_call() -> None:
    """The methods are those in the table that every service uses. Every role may call WhoAmI."""
    for role in ROLES:
        names = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset({role}))).methods
        assert set(names) == {name for name, callers in CALLERS.items() if role in callers}
        assert "/pawl.agent.v1.AgentService/WhoAmI" in names
    without = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset())).methods
    assert set(without) == {name for name, callers in CALLERS.items() if Role.MEMBER in callers}
    assert "/pawl.agent.v1.AgentService/WhoAmI" not in caller_info(service_principal("agent-loop")).methods


# A delegate without the right to decide cannot approve or reject anything for a person.


DIGEST = "digest of call_1"
APPROVE, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_EDIT
REJECT, ANSWER = call_pb2.DECISION_KIND_REJECT, call_pb2.DECISION_KIND_ANSWER


def decide(**fields: Any) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(call_id="call_1", digest=DIGEST, **fields)
    return agent_pb2.DecideRequest(run_id="run_1", decision=decision)


@pytest.mark.parametrize(
    "for_whom", [(), (("pawl-user", "me"),), (("pawl-user", "me"), ("pawl-roles", "approver,operator"))]
)
async def test_delegate_cannot_decide(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, for_whom: tuple[tuple[str, str], ...]
) -> None:
    """HITL-4: it cannot decide for a user or in its own name, by any method, but it may cancel runs.

    Frames of a session are handled like `Decide`.
    """
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await ledger.add_call("call_2", call_pb2.CALL_STATE_ASKED)
    metadata = (*DELEGATE, *for_whom)
    call_1: dict[str, Any] = {"run_id": "run_1", "call_id": "call_1", "digest": DIGEST}
    both = [
        types_pb2.CallDecision(kind=call_pb2.DECISION_KIND_APPROVE, **call_1),
        types_pb2.CallDecision(run_id="run_1", call_id="call_2", kind=ANSWER, answer="yes"),
    ]
    refused: list[Any] = [
        stub.Decide(decide(kind=APPROVE), metadata=metadata),
        stub.Decide(decide(kind=REJECT), metadata=metadata),
        stub.Decide(decide(kind=EDIT, arguments_json=b'{"to": "ann"}'), metadata=metadata),
        stub.Decide(decide(kind=ANSWER, answer="it is done"), metadata=metadata),
        stub.DecideCalls(agent_pb2.DecideCallsRequest(decisions=both), metadata=metadata),
    ]
    if metadata[-1][0] != "pawl-user":
        refused.append(
            stub.ResolveCall(
                agent_pb2.ResolveCallRequest(
                    run_id="run_1", call_id="call_1", resolution=agent_pb2.RESOLUTION_RUN_AGAIN
                ),
                metadata=metadata,
            )
        )
    for call in refused:
        error = await failure(call)
        assert isinstance(error, PermissionDenied)
        assert "their own key or token" in error.message
    assert not ledger.commands
    if for_whom:
        cancel = agent_pb2.CancelRunRequest(run_id="run_1")
        assert (await stub.CancelRun(cancel, metadata=metadata)).run.state == run_pb2.RUN_STATE_CANCELLING


# An agent-loop that is older than its clients rejects unknown values by name, never with INTERNAL (OPS-4).


CALLS = calls_by_method(
    agent_pb2.DESCRIPTOR.services_by_name["AgentService"], operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
)


async def test_unknown_enum_value_is_rejected(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run("x1")
    of_the_ledger = {"decisions.edited_series.end_time"}
    for method in sorted(CALLS.keys() - {"Session"}):
        for field, request in CALLS[method]:
            if field in of_the_ledger:
                continue
            answer: Any = getattr(stub, method)(request, metadata=ADMIN)
            code = await code_of(answer, is_enough=bool)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, f"{method} {field}"


async def test_frame_with_an_unknown_value_is_rejected_and_the_session_continues(
    stub: AgentServiceAsyncStub,
) -> None:
    client = Client(stub)
    await client.hello()
    for field, request in CALLS["Session"]:
        kind = request.WhichOneof("frame")
        if kind == "hello":
            continue  # Invalid tools are reported when they come with a run
        receipt = await client.ask(**{kind: getattr(request, kind)})
        assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_FIELD"), field


def test_unknown_value_cases_cover_the_expected_requests() -> None:
    assert CALLS.keys() == {
        "Decide",
        "DecideCalls",
        "ListPending",
        "ListRuns",
        "ResolveCall",
        "SendMessage",
        "Session",
        "StartRun",
        "WatchPending",
    }
    frames = {request.WhichOneof("frame") for _, request in CALLS["Session"]}
    assert frames == {"hello", "start", "decision", "message"}
    assert frames < set(session_pb2.SessionRequest.DESCRIPTOR.fields_by_name)
