"""What a deployment fills in is no part of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.adapters import wire
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc import convert
from pawl.agent_loop.rpc.servicer import AgentServicer
from pawl.agent_loop.wiring import ClientSide
from pawl.event.v1 import run_pb2
from tests.fakes.checker import FakeChecker
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.errors import reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


async def test_a_deploy_with_other_defaults_leaves_requests_as_they_are(
    stub: AgentServiceAsyncStub, clients: ClientSide, servicer: AgentServicer, ledger: PlayedLedger
) -> None:
    """I2: what a request left open is no part of it."""
    asked = run_pb2.RunOptions(temperature=0.5, limits=run_pb2.RunLimits(rounds_max=3))
    request = agent_pb2.StartRunRequest(request_id="r1", text="Hello", options=asked)
    before = (await stub.StartRun(request, metadata=ME)).run
    limits = Limits(run_timeout_seconds=100.0)
    servicer._messages = Messages(
        ledger=ledger,
        agents=clients.agents,
        defaults=RunDefaults(model="a-newer-model", limits=limits),
        checker=FakeChecker(),
        documents=FakeChecker(),
        takes_images=False,
        tools=FakeChecker(),
    )
    again = (await stub.StartRun(request, metadata=ME)).run
    assert (again.run_id, again.options.model) == (before.run_id, "the-model")
    request.options.limits.rounds_max = 4
    assert await reason(stub.StartRun(request, metadata=ME)) == "REQUEST_ID_REUSED"


def test_options_reach_the_ledger_as_they_were_asked_for_too() -> None:
    asked = run_pb2.RunOptions(model="m", temperature=0.5, tool_names=["a"])
    asked.limits.rounds_max = 3
    asked.limits.run_timeout_seconds = 2.5
    message = wire.ASKED.write(convert.options(asked))
    assert message.limits == asked.limits
    assert (message.model, message.temperature, list(message.tool_names)) == ("m", 0.5, ["a"])
    assert not message.HasField("output_tokens_max")


@pytest.mark.parametrize("asked", [run_pb2.RunOptions(), run_pb2.RunOptions(limits=run_pb2.RunLimits())])
def test_a_request_without_limits_has_the_same_bytes_in_every_version(asked: run_pb2.RunOptions) -> None:
    """I2: job-store tells requests apart by their bytes, and versions before wrote no empty limits."""
    assert not wire.ASKED.write(convert.options(asked)).HasField("limits")
