"""WhoAmI: what a caller is told about itself, and about the deployment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import whoami_pb2 as pb
from pawl.agent_loop.app.agents import Agents
from pawl.agent_loop.app.whoami import Introductions, caller_info
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc import convert
from pawl.agent_loop.wiring import ClientSide
from pawl.chassis.auth import service_principal, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.roles import CALLERS, ROLES, Role
from tests.fakes.checker import FakeChecker
from tests.rpc.agent_loop.conftest import ADMIN, APPROVER, DELEGATE, ME, OPERATOR

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub


@pytest.fixture
def agents(clients: ClientSide) -> Agents:
    return clients.agents


async def ask(stub: AgentServiceAsyncStub, metadata: Any) -> pb.WhoAmIResponse:
    return await stub.WhoAmI(pb.WhoAmIRequest(), metadata=metadata)


async def test_a_caller_is_told_who_it_is(stub: AgentServiceAsyncStub) -> None:
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
async def test_a_caller_is_told_what_it_decides(stub: AgentServiceAsyncStub, metadata: Any, right: int) -> None:
    """HITL-4."""
    assert (await ask(stub, metadata)).caller.decision_right == right


async def test_a_caller_is_told_what_the_deployment_offers(stub: AgentServiceAsyncStub) -> None:
    offer = (await ask(stub, ME)).deployment
    assert (offer.model, offer.approvals_required, offer.tool_count) == ("the-model", 1, 7)
    assert list(offer.agent_names) == ["default"]
    assert offer.version
    assert (offer.limits.rounds_max, offer.ceilings.rounds_max) == (10, 1000)
    names = {field.name for field in offer.limits.DESCRIPTOR.fields}
    for limits in (offer.limits, offer.ceilings):
        assert {field.name for field, _ in limits.ListFields()} == names


def introducing(checker: FakeChecker, agents: Agents) -> Introductions:
    defaults = RunDefaults(model="m")
    return Introductions(checker=checker, agents=agents, defaults=defaults, takes_images=False, version="1")


async def test_a_key_of_the_deployment_has_no_store_no_tools_and_no_agents(agents: Agents) -> None:
    introductions = introducing(FakeChecker(), agents)
    caller = user_principal(StoreId(""), UserId("root"), frozenset({Role.DEPLOYMENT}), credential_id=CredentialId("k"))
    told = convert.INTRODUCTION.write(await introductions.introduce(replace(caller, expires_at=1.5)))
    assert (told.caller.store_id, told.caller.credential_id, told.caller.expire_time.nanos) == ("", "k", 500_000_000)
    assert not told.deployment.HasField("tool_count")
    assert not told.deployment.agent_names
    assert told.caller.decision_right == pb.DECISION_RIGHT_UNSPECIFIED


def test_what_a_caller_may_call_is_what_it_is_told() -> None:
    """The table that every service asks, and nothing else; every role may ask who it is."""
    for role in ROLES:
        told = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset({role}))).methods
        assert set(told) == {name for name, callers in CALLERS.items() if role in callers}
        assert "/pawl.agent.v1.AgentService/WhoAmI" in told
    without = caller_info(user_principal(StoreId("acme"), UserId("ann"), frozenset())).methods
    assert set(without) == {name for name, callers in CALLERS.items() if Role.MEMBER in callers}
    assert "/pawl.agent.v1.AgentService/WhoAmI" not in caller_info(service_principal("agent-loop")).methods
