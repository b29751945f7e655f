"""Job stores over real gRPC and a real database. Several job stores on one database are replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.identity.auth import Authenticator
from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc import limits as rpc_limits
from pawl.chassis.rpc.client import open_channel
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceStub
from pawl.job_store.keys.keys import Keys
from pawl.job_store.ledger.ledger import Ledger
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rules.slots import SlotLimits, StoreSlots
from pawl.job_store.store_settings.snapshot import SettingsSnapshot
from pawl.job_store.sweeps import RetentionPeriods
from pawl.job_store.wiring import on_postgres
from pawl.server.bus.connection import Bus
from pawl.server.db.database import Database
from pawl.server.process.metrics import Metrics
from pawl.server.process.service import Background
from pawl.server.rpc.server import RpcServer
from tests import databases
from tests.fakes.session_agent import OpenAuthenticator
from tests.rpc.job_store.user import Owner, User
from tests.rpc.stubs import LedgerServiceAsyncStub

QUEUE_MAX = 5
CRASHES_MAX = 3
# High enough not to affect other tests.
SLOT_LIMITS = SlotLimits(per_store=1000, per_user=1000)
SLOTS = StoreSlots(SLOT_LIMITS)
STORE_QUEUE_MAX = 1000
DAY_SECONDS = 86_400.0
RETENTION = RetentionPeriods(
    requests_seconds=DAY_SECONDS,
    unsent_seconds=DAY_SECONDS,
    sent_seconds=DAY_SECONDS,
    events_seconds=7 * DAY_SECONDS,
    keys_seconds=90 * DAY_SECONDS,
    interval_seconds=600,
)


ACME = StoreId("acme")


def limits_of(_store_id: StoreId) -> Limits:
    return Limits(slots=SLOT_LIMITS, conversation_retention_days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    channel: grpc.aio.Channel
    stub: LedgerServiceAsyncStub
    ledger: Ledger
    database: Database
    bus: Bus
    metrics: Metrics
    settings: SettingsSnapshot


StartReplica = Callable[..., Awaitable[Replica]]


@pytest.fixture(scope="session")
def ledger_database(postgres_url: str) -> Iterator[databases.ServiceDatabase]:
    with databases.ServiceDatabase(postgres_url, "job_store") as database:
        yield database


@pytest.fixture
def database_url(ledger_database: databases.ServiceDatabase) -> str:
    ledger_database.empty()
    return ledger_database.url


@pytest.fixture
async def database(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """The pool of the job stores, with a long timeout because PostgreSQL may be slow on a busy machine."""
    monkeypatch.setattr("pawl.server.db.heartbeat._WINDOW_SECONDS", 60.0)
    async with Database(database_url, application_name="test") as database:
        await database.create_schema("job_store")
        yield database


@pytest.fixture
async def start(database: Database, tmp_path: Path) -> AsyncIterator[StartReplica]:
    """Start replicas on the test's database: `await start()`, `await start(nats_url=...)`.

    Its limits are `slots` and `store_queue_max`. `knowing` creates its authenticator. By default, all calls pass.
    """
    async with AsyncExitStack() as stack:
        count = 0

        async def start_one(
            *,
            nats_url: str | None = None,
            slots: SlotLimits = SLOT_LIMITS,
            store_queue_max: int = STORE_QUEUE_MAX,
            knowing: Callable[[Keys], Authenticator] = lambda _: OpenAuthenticator(),
        ) -> Replica:
            nonlocal count
            count += 1
            clock = SystemClock()
            ids = IdSource(clock)
            metrics = Metrics(f"job_store_{count}")
            bus = await stack.enter_async_context(Bus(nats_url, name="test", metrics=metrics))
            limits = Limits(crashes_max=CRASHES_MAX, queue_max=QUEUE_MAX, store_queue_max=store_queue_max, slots=slots)
            parts = on_postgres(
                database, bus, limits, RETENTION, clock=clock, ids=ids, metrics=metrics, keeps_lifecycle=True
            )
            await stack.enter_async_context(parts.group_commit)
            if nats_url is not None:
                (await stack.enter_async_context(Background())).start("relay", parts.loops["relay"])
            address = f"unix:{tmp_path}/{count}"
            server = RpcServer(
                address,
                authenticator=knowing(parts.keys),
                ids=ids,
                metrics=metrics,
                limits=rpc_limits.Limits(message_bytes_max=32 * 1024 * 1024),
                drain_seconds=0.2,
            )
            parts.add_to(server)
            await stack.enter_async_context(server)
            channel = await stack.enter_async_context(open_channel(address, message_bytes_max=32 * 1024 * 1024))
            stub: Any = LedgerServiceStub(channel)
            stub.channel = channel
            return Replica(
                channel=channel,
                stub=stub,
                ledger=parts.ledger,
                database=database,
                bus=bus,
                metrics=metrics,
                settings=parts.settings,
            )

        yield start_one


@pytest.fixture
async def replica(start: StartReplica) -> Replica:
    return await start()


@pytest.fixture
def stub(replica: Replica) -> LedgerServiceAsyncStub:
    return replica.stub


@pytest.fixture
def user(stub: LedgerServiceAsyncStub) -> User:
    return User(stub)


@pytest.fixture
async def owner(user: User) -> Owner:
    return await user.start()
