"""AgentService on a real gRPC server, with a ledger in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.agent.v1.agents_pb2_grpc import AgentRegistryServiceStub
from pawl.agent.v1.conversation_pb2_grpc import ConversationServiceStub
from pawl.agent.v1.goal_pb2_grpc import GoalServiceStub
from pawl.agent.v1.jobs_pb2_grpc import JobServiceStub
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub
from pawl.agent.v1.workflow_pb2_grpc import WorkflowServiceStub
from pawl.agent_loop.api.rounds import Rebuilding
from pawl.agent_loop.api.rpc import AgentServicer
from pawl.agent_loop.api.session_stream import SessionTimes
from pawl.agent_loop.api.watch import Watches
from pawl.agent_loop.loop.model_call import request_of
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.options import RunDefaults
from pawl.agent_loop.model.client import body_of
from pawl.agent_loop.wiring import ClientSide, ClientTimes
from pawl.chassis.ids import IdSource
from pawl.event.v1 import call_pb2
from pawl.server.identity.credentials import ApiKey
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from tests.fakes.loop_world import MemoryAgents, workflow_servicers
from tests.fakes.manual_clock import ManualClock
from tests.fakes.registry import FakeChecker
from tests.fakes.session_agent import FakeLive
from tests.keys import authenticator
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.stubs import (
    AgentRegistryServiceAsyncStub,
    AgentServiceAsyncStub,
    ConversationServiceAsyncStub,
    GoalServiceAsyncStub,
    JobServiceAsyncStub,
    OperatorServiceAsyncStub,
    WorkflowServiceAsyncStub,
)

KEYS = [
    ApiKey(key="key-of-me-0123456789", store_id="local", user_id="me", roles=["member"]),
    ApiKey(key="key-of-me-approving1", store_id="local", user_id="me", roles=["approver"]),
    ApiKey(key="key-of-operator-0123", store_id="local", user_id="me", roles=["operator"]),
    ApiKey(key="key-of-other-user-01", store_id="local", user_id="you", roles=["member"]),
    ApiKey(key="key-of-other-store-1", store_id="elsewhere", user_id="me", roles=["member"]),
    ApiKey(key="key-of-helping-boss1", store_id="local", user_id="boss", roles=["operator"]),
    ApiKey(key="key-of-the-admin-012", store_id="local", user_id="root", roles=["admin"]),
    ApiKey(key="key-of-foreign-boss1", store_id="elsewhere", user_id="boss", roles=["operator", "admin"]),
    ApiKey(
        key="key-of-a-product-012",
        store_id="local",
        user_id="shop",
        roles=["delegate", "member", "approver", "operator"],
    ),
    ApiKey(key="key-of-the-office-12", store_id="local", user_id="office", roles=["delegate", "member", "admin"]),
]
# The metadata of each key, in the order of KEYS. A delegate may not decide, and the office acts for the admin.
ME, APPROVER, OPERATOR, *OTHER_USERS, BOSS, ADMIN, FOREIGN_BOSS, DELEGATE, _OFFICE = (
    (("authorization", f"Bearer {each.key}"),) for each in KEYS
)
OFFICE = (*_OFFICE, ("pawl-user", "root"), ("pawl-roles", "admin"))


@pytest.fixture
def live() -> FakeLive:
    return FakeLive()


@pytest.fixture
async def ledger(clock: ManualClock, live: FakeLive) -> AsyncIterator[PlayedLedger]:
    async with PlayedLedger(clock, live) as ledger:
        yield ledger


@pytest.fixture
async def run(ledger: PlayedLedger) -> None:
    await ledger.add_run()


@pytest.fixture
async def gated_run(run: None, ledger: PlayedLedger) -> None:
    """The first user's run, which waits for an approval."""
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    ledger.put_run("run_1", token_budget=1000)


@pytest.fixture
def times() -> SessionTimes:
    return SessionTimes()


@pytest.fixture
async def clients(
    ledger: PlayedLedger,
    live: FakeLive,
    times: SessionTimes,
    clock: ManualClock,
    ids: IdSource,
    *,
    checker: FakeChecker,
    agent_ledger: MemoryAgents,
) -> AsyncIterator[ClientSide]:
    clients = client_side(ledger, live, clock, ids, times, checker=checker, agents=agent_ledger)
    async with clients.watches:
        yield clients


@pytest.fixture
def checker() -> FakeChecker:
    return FakeChecker()


@pytest.fixture
def agent_ledger() -> MemoryAgents:
    return MemoryAgents()


def client_side(
    ledger: PlayedLedger,
    live: FakeLive,
    clock: ManualClock,
    ids: IdSource,
    times: SessionTimes | None = None,
    *,
    checker: FakeChecker | None = None,
    agents: MemoryAgents | None = None,
) -> ClientSide:
    agents = agents or MemoryAgents()
    ledger.servicers += [agents.forwarded, *workflow_servicers()]
    quick = ClientTimes(
        sessions=times or SessionTimes(),
        heartbeat_seconds=0.05,
        poll_seconds=0.02,
        connected_poll_seconds=0.02,
    )
    return ClientSide(
        ledger=ledger,
        live=live,
        agents=agents,
        registry=checker or FakeChecker(),
        clock=clock,
        ids=ids,
        defaults=RunDefaults(model="the-model", instructions="Be brief."),
        takes_images=True,
        rebuilding=Rebuilding(partial(request_of, default_model="the-model", echo=ReasoningEcho.AUTO), body_of),
        times=quick,
    )


@pytest.fixture
def watches(clients: ClientSide) -> Watches:
    return clients.watches


@pytest.fixture
def servicer(clients: ClientSide) -> AgentServicer:
    return clients.servicer


@pytest.fixture
async def server(clients: ClientSide, ids: IdSource, tmp_path: Path) -> AsyncIterator[RpcServer]:
    async with new_server(clients, f"unix:{tmp_path}/agent", ids) as server:
        yield server


def new_server(clients: ClientSide, address: str, ids: IdSource) -> RpcServer:
    server = RpcServer(
        address,
        authenticator=authenticator(KEYS),
        ids=ids,
        metrics=Metrics("agent_loop"),
        drain_seconds=0.2,
    )
    clients.add_to(server)
    return server


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> AgentServiceAsyncStub:
    return AgentServiceStub(channel)


@pytest.fixture
def jobs(channel: grpc.aio.Channel) -> JobServiceAsyncStub:
    return JobServiceStub(channel)


@pytest.fixture
def goals(channel: grpc.aio.Channel) -> GoalServiceAsyncStub:
    return GoalServiceStub(channel)


@pytest.fixture
def operators(channel: grpc.aio.Channel) -> OperatorServiceAsyncStub:
    return OperatorServiceStub(channel)


@pytest.fixture
def agents(channel: grpc.aio.Channel) -> AgentRegistryServiceAsyncStub:
    return AgentRegistryServiceStub(channel)


@pytest.fixture
def workflows(channel: grpc.aio.Channel) -> WorkflowServiceAsyncStub:
    return WorkflowServiceStub(channel)


@pytest.fixture
def conversations(channel: grpc.aio.Channel) -> ConversationServiceAsyncStub:
    return ConversationServiceStub(channel)


@pytest.fixture
def api(channel: grpc.aio.Channel) -> Any:
    """Call the method that takes this request type. For a stream, return its first response."""
    services = (
        *(AgentServiceStub, AgentRegistryServiceStub, ConversationServiceStub, GoalServiceStub, JobServiceStub),
        *(OperatorServiceStub, WorkflowServiceStub),
    )
    stubs = [service(channel) for service in services]

    def call(request: Any, metadata: Any = ME) -> Any:
        name = type(request).__name__.removesuffix("Request")
        answer = next(getattr(stub, name) for stub in stubs if hasattr(stub, name))(request, metadata=metadata)
        return answer.read() if isinstance(answer, grpc.aio.UnaryStreamCall) else answer

    return call
