"""Messages as large as gRPC lets them be: none keeps a replica busy, and none is too large for a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.rpc import convert
from pawl.event.v1 import call_pb2, run_pb2
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


async def test_what_waits_fits_into_a_message(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """A client with gRPC's own limit of 4 MiB can read every run; the calls left out come as others are settled."""
    await ledger.add_run()
    for number in range(8):
        await ledger.offer(f"call_{number}")
        ledger.put_call(f"call_{number}", arguments=b"x" * 500_000)
    run = (await stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1"), metadata=ME)).run
    assert [call.call_id for call in run.pending_calls] == [f"call_{number}" for number in range(4)]


@pytest.mark.parametrize(("pending", "left"), [(0, (0, 4)), (1, (1, 3)), (4, (4, 0)), (7, (4, 0))])
def test_calls_that_go_on_fit_into_a_message_behind_those_that_wait(pending: int, left: tuple[int, int]) -> None:
    calls = [call_pb2.Call(call_id=f"call_{number}", arguments_json=b"x" * 500_000) for number in range(8)]
    run = run_pb2.Run(run_id="run_1", pending_calls=calls[:pending], active_calls=calls[pending:])
    shown = convert.run_message(run)
    assert (len(shown.pending_calls), len(shown.active_calls)) == left
    assert [*shown.pending_calls, *shown.active_calls] == calls[:4]
    assert len(run.active_calls) == 8 - pending, "the run itself stays as it is"
