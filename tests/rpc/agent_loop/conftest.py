"""AgentService on a real gRPC server, over a ledger in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub, add_AgentServiceServicer_to_server
from pawl.agent.v1.operator_pb2_grpc import OperatorServiceStub, add_OperatorServiceServicer_to_server
from pawl.agent_loop.adapters import step_log
from pawl.agent_loop.app.inbox import Inbox
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.operators import Operators
from pawl.agent_loop.app.pending import Pending
from pawl.agent_loop.app.run_steps import RunSteps
from pawl.agent_loop.app.session import Sessions
from pawl.agent_loop.app.stream import SessionTimes
from pawl.agent_loop.app.undoing import Undoing
from pawl.agent_loop.app.watch import Watches
from pawl.agent_loop.domain.options import RunDefaults
from pawl.agent_loop.rpc.operator_servicer import OperatorServicer
from pawl.agent_loop.rpc.servicer import AgentServicer
from pawl.chassis.auth import ApiKey, KeyAuthenticator
from pawl.chassis.clock import SystemClock
from pawl.chassis.ids import IdSource
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_server import RpcServer
from tests.fakes.checker import FakeChecker
from tests.fakes.live_events import FakeLive
from tests.fakes.manual_clock import ManualClock
from tests.fakes.public_ledger import FakeLedger

if TYPE_CHECKING:
    from pawl.agent.v1.agent_pb2_grpc import AgentServiceAsyncStub
    from pawl.agent.v1.operator_pb2_grpc import OperatorServiceAsyncStub

KEYS = [
    ApiKey(key="key-of-me-0123456789", store_id="local", user_id="me", roles=["member"]),
    ApiKey(key="key-of-operator-0123", store_id="local", user_id="me", roles=["operator"]),
    ApiKey(key="key-of-other-user-01", store_id="local", user_id="you", roles=["member"]),
    ApiKey(key="key-of-other-store-1", store_id="elsewhere", user_id="me", roles=["member"]),
    ApiKey(key="key-of-helping-boss1", store_id="local", user_id="boss", roles=["operator"]),
    ApiKey(key="key-of-the-admin-012", store_id="local", user_id="root", roles=["admin"]),
    ApiKey(key="key-of-foreign-boss1", store_id="elsewhere", user_id="boss", roles=["operator", "admin"]),
]
ME = (("authorization", "Bearer key-of-me-0123456789"),)
OPERATOR = (("authorization", "Bearer key-of-operator-0123"),)
BOSS = (("authorization", "Bearer key-of-helping-boss1"),)
ADMIN = (("authorization", "Bearer key-of-the-admin-012"),)
FOREIGN_BOSS = (("authorization", "Bearer key-of-foreign-boss1"),)
STRANGERS = [
    (("authorization", "Bearer key-of-other-user-01"),),
    (("authorization", "Bearer key-of-other-store-1"),),
]


@pytest.fixture
def live() -> FakeLive:
    return FakeLive()


@pytest.fixture
def ledger(clock: ManualClock, live: FakeLive) -> FakeLedger:
    return FakeLedger(clock, live)


@pytest.fixture
def times() -> SessionTimes:
    return SessionTimes()


@pytest.fixture
async def watches(ledger: FakeLedger, live: FakeLive) -> AsyncIterator[Watches]:
    async with Watches(ledger=ledger, live=live, poll_seconds=0.02, connected_poll_seconds=0.02) as watches:
        yield watches


@pytest.fixture
def servicer(
    ledger: FakeLedger, watches: Watches, times: SessionTimes, clock: ManualClock, ids: IdSource
) -> AgentServicer:
    defaults = RunDefaults(model="the-model", instructions="Be brief.")
    messages = Messages(ledger=ledger, defaults=defaults)
    inbox = Inbox(ledger=ledger, checker=FakeChecker(), ids=ids)
    sessions = Sessions(
        ledger=ledger, watches=watches, messages=messages, inbox=inbox, clock=clock, ids=ids, times=times
    )
    return AgentServicer(
        ledger=ledger,
        messages=messages,
        inbox=inbox,
        pending=Pending(ledger=ledger, clock=SystemClock(), poll_seconds=0.02),
        watches=watches,
        sessions=sessions,
        undoing=Undoing(ledger=ledger, defaults=defaults),
        steps=RunSteps(ledger=ledger, watches=watches, take_in=step_log.take_in),
        heartbeat_seconds=0.05,
    )


@pytest.fixture
async def server(
    servicer: AgentServicer, ledger: FakeLedger, ids: IdSource, tmp_path: Path
) -> AsyncIterator[RpcServer]:
    server = RpcServer(
        f"unix:{tmp_path}/agent",
        authenticator=KeyAuthenticator(KEYS),
        ids=ids,
        metrics=Metrics("agent_loop"),
        drain_seconds=0.2,
    )
    server.add(add_AgentServiceServicer_to_server, servicer)
    server.add(add_OperatorServiceServicer_to_server, OperatorServicer(Operators(ledger=ledger, ids=ids)))
    async with server:
        yield server


@pytest.fixture
async def stub(server: RpcServer) -> AsyncIterator[AgentServiceAsyncStub]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield AgentServiceStub(channel)


@pytest.fixture
async def operators(server: RpcServer) -> AsyncIterator[OperatorServiceAsyncStub]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield OperatorServiceStub(channel)
