"""An agent-loop that is older than its clients refuses by name what it does not know, never with INTERNAL (OPS-4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from pawl.agent.v1 import agent_pb2, operator_pb2, session_pb2, types_pb2
from tests.fakes.unknown_values import calls_by_method, code_of
from tests.rpc.agent_loop.client import Client
from tests.rpc.agent_loop.conftest import ADMIN
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub

CALLS = calls_by_method(
    agent_pb2.DESCRIPTOR.services_by_name["AgentService"], operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
)


async def test_a_value_that_is_unknown_is_refused(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    await ledger.add_run("x1")
    for method in sorted(CALLS.keys() - {"Session"}):
        for field, request in CALLS[method]:
            answer: Any = getattr(stub, method)(request, metadata=ADMIN)
            code = await code_of(answer, is_enough=bool)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, f"{method} {field}"


async def test_a_frame_with_a_value_that_is_unknown_is_refused_and_the_session_goes_on(
    stub: AgentServiceAsyncStub,
) -> None:
    client = Client(stub)
    await client.hello()
    for field, request in CALLS["Session"]:
        kind = request.WhichOneof("frame")
        if kind == "hello":
            continue  # What is wrong with its tools is said when they come with a run.
        receipt = await client.ask(**{kind: getattr(request, kind)})
        assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_FIELD"), field


def test_there_are_such_fields() -> None:
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
