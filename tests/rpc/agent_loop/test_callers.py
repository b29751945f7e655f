"""WhoAmI, what delegates may not do, and what operators see and do in a store."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, operator_pb2, types_pb2
from pawl.agent.v1 import whoami_pb2 as pb
from pawl.agent_loop.api.whoami import caller_info
from pawl.chassis.identity.auth import Principal, service_principal, user_principal
from pawl.chassis.identity.roles import CALLERS, ROLES, Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from tests.rpc.agent_loop.asking import ANSWER, APPROVE, DIGEST, EDIT, REJECT, decide, failure, reason
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, BOSS, DELEGATE, ME, OPERATOR
from tests.rpc.agent_loop.ledger import YOU, PlayedLedger
from tests.rpc.stubs import AgentServiceAsyncStub, OperatorServiceAsyncStub


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
async def test_whoami_returns_what_the_caller_may_decide_on(
    stub: AgentServiceAsyncStub, metadata: Any, right: int
) -> None:
    """HITL-4: what a caller may decide depends on its roles."""
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


@pytest.mark.parametrize(
    "for_whom", [(), (("pawl-user", "me"),), (("pawl-user", "me"), ("pawl-roles", "approver,operator"))]
)
async def test_delegate_cannot_decide(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, for_whom: tuple[tuple[str, str], ...]
) -> None:
    """HITL-4: a delegate cannot decide for a user or in its own name, by any method, but it may cancel runs.

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


QUARANTINED = run_pb2.ATTENTION_REASON_QUARANTINED
UNKNOWN_OUTCOME = run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME


def redrive(run_id: str = "run_1", request_id: str = "", reason: str = "") -> operator_pb2.RedriveRunRequest:
    return operator_pb2.RedriveRunRequest(request_id=request_id, run_id=run_id, reason=reason)


async def test_operator_sees_runs_that_need_attention_without_their_content(
    operators: OperatorServiceAsyncStub, ledger: PlayedLedger
) -> None:
    await ledger.add_run("run_1")
    await ledger.add_run("run_2", YOU)
    await ledger.add_run("run_3")
    await ledger.add_run("run_4", Principal(store_id=StoreId("elsewhere"), user_id=UserId("me")))
    ledger.put_run("run_2", output=run_pb2.Run(output_text="a secret").SerializeToString(), crashes=3)
    await ledger.need_attention(QUARANTINED, "run_2")
    await ledger.need_attention(UNKNOWN_OUTCOME, "run_3")
    await ledger.need_attention(QUARANTINED, "run_4")
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=BOSS)
    assert [(run.run_id, run.user_id, run.attention.reason, run.crash_count) for run in page.runs] == [
        ("run_2", "you", QUARANTINED, 3),
        ("run_3", "me", UNKNOWN_OUTCOME, 0),
    ]
    assert b"a secret" not in page.SerializeToString()
    only = operator_pb2.ListAttentionRequest(run_id="run_3")
    assert [run.run_id for run in (await operators.ListAttention(only, metadata=BOSS)).runs] == ["run_3"]
    calm = operator_pb2.ListAttentionRequest(run_id="run_1")
    assert not (await operators.ListAttention(calm, metadata=BOSS)).runs
    for absent in ("run_absent", "run_4"):  # The last run is of another store
        request = operator_pb2.ListAttentionRequest(run_id=absent)
        assert await reason(operators.ListAttention(request, metadata=BOSS)) == "RUN_NOT_FOUND"


async def test_quarantined_run_is_redriven_once(operators: OperatorServiceAsyncStub, ledger: PlayedLedger) -> None:
    """I2: a repeated request has no further effect."""
    await ledger.add_run()
    await ledger.need_attention(QUARANTINED)
    request = redrive(request_id="r1", reason="mended")
    for _ in range(2):
        answer = await operators.RedriveRun(request, metadata=BOSS)
        assert answer.state == run_pb2.RUN_STATE_QUEUED
    assert ledger.commands == [ledger_pb2.Command(redrive=ledger_pb2.RedriveCommand(reason="mended"))]
    assert await reason(operators.RedriveRun(redrive(request_id="r2"), metadata=BOSS)) == "ATTENTION_NOT_NEEDED"


async def test_an_approval_without_arguments_cannot_be_edited(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    spec = call_pb2.Call(context=call_pb2.EXECUTION_CONTEXT_HUMAN)
    await ledger.add_run("run_2")
    await ledger.add_call("asks", call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="run_2", spec=spec)
    edit = types_pb2.CallDecision(call_id="asks", kind=EDIT, digest="digest of asks", arguments_json=b"{}")
    error = await failure(stub.Decide(agent_pb2.DecideRequest(run_id="run_2", decision=edit), metadata=ME))
    assert error.message == "the call only asks people, so it has no arguments to edit"
