"""A delegate that does not decide: refused wherever somebody says yes or no for a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.errors import PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.client import ACCEPTED, REFUSED, Client
from tests.rpc.agent_loop.conftest import DELEGATE
from tests.rpc.agent_loop.errors import failure
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

DIGEST = "digest of call_1"
APPROVE, EDIT = call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_EDIT
REJECT, ANSWER = call_pb2.DECISION_KIND_REJECT, call_pb2.DECISION_KIND_ANSWER


def decide(**fields: Any) -> agent_pb2.DecideRequest:
    decision = types_pb2.CallDecision(call_id="call_1", digest=DIGEST, **fields)
    return agent_pb2.DecideRequest(run_id="run_1", decision=decision)


@pytest.mark.parametrize(
    "for_whom", [(), (("pawl-user", "me"),), (("pawl-user", "me"), ("pawl-roles", "approver,operator"))]
)
async def test_a_delegate_decides_nothing(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, for_whom: tuple[tuple[str, str], ...]
) -> None:
    """HITL-4: neither for a user nor in its own name. It cancels, and brings results: that says yes to nothing."""
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
        assert "key or token of their own" in error.message
    assert not ledger.commands
    if for_whom:
        cancel = agent_pb2.CancelRunRequest(run_id="run_1")
        assert (await stub.CancelRun(cancel, metadata=metadata)).run.state == run_pb2.RUN_STATE_CANCELLING


async def test_the_decisions_of_a_delegate_are_refused_and_its_stops_go_through(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """HITL-4: the stream of a user whom a delegate stands for."""
    await ledger.add_run()
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    client = Client(stub, metadata=(*DELEGATE, ("pawl-user", "me"), ("pawl-roles", "approver")))
    await client.hello()
    for kind in (call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_REJECT):
        decision = types_pb2.CallDecision(run_id="run_1", call_id="call_1", kind=kind, digest="digest of call_1")
        refused = await client.ask(decision=decision)
        assert (refused.status, refused.reason) == (REFUSED, "PERMISSION_DENIED")
    assert not ledger.commands
    assert (await client.ask(cancel=session_pb2.Cancel(run_id="run_1"))).status == ACCEPTED
