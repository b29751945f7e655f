"""Job stores over real gRPC and a real database; several of them share one database like replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pawl.chassis.bus import Bus
from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.lifecycle import Background
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_client import open_channel
from pawl.chassis.rpc_server import RpcServer
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceStub, add_LedgerServiceServicer_to_server
from pawl.job_store.adapters.announcer import NatsAnnouncer
from pawl.job_store.adapters.attention import PostgresAttentionBook
from pawl.job_store.adapters.journal import PostgresJournal
from pawl.job_store.adapters.leases import PostgresLeases
from pawl.job_store.adapters.lifecycle_stream import JetStreamLifecycle
from pawl.job_store.adapters.metrics import PrometheusMeter
from pawl.job_store.adapters.outbox import PostgresOutbox
from pawl.job_store.adapters.reads import PostgresReads
from pawl.job_store.adapters.upkeep import PostgresOfferBook
from pawl.job_store.app.group_commit import GroupCommit
from pawl.job_store.app.ledger import Ledger
from pawl.job_store.app.sweeps import Relay
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.rpc.messages import encode_event
from pawl.job_store.rpc.servicer import LedgerServicer
from tests.fakes.anybody import Anybody
from tests.rpc.job_store.user import User

if TYPE_CHECKING:
    from pawl.job.v1.ledger_pb2_grpc import LedgerServiceAsyncStub

QUEUE_MAX = 5
CRASHES_MAX = 3
# Out of the way of tests of something else.
PLACES = PlaceLimits(per_store=1000, per_user=1000)
STORE_QUEUE_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One job store: its API as a client sees it, and its inside."""

    stub: LedgerServiceAsyncStub
    ledger: Ledger
    database: Database
    bus: Bus
    relay: Relay
    metrics: Metrics
    group_commit: GroupCommit


StartReplica = Callable[..., Awaitable[Replica]]


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url, application_name="test") as database:
        await database.migrate("job_store", "pawl.job_store.adapters.sql.migrations")
        yield database


@pytest.fixture
async def start(database: Database, tmp_path: Path) -> AsyncIterator[StartReplica]:
    """Start replicas of the job store on the test's database: `await start()`, `await start(nats_url=...)`.

    Its limits are `places` and `store_queue_max`.
    """
    async with AsyncExitStack() as stack:
        count = 0

        async def start_one(
            *, nats_url: str | None = None, places: PlaceLimits = PLACES, store_queue_max: int = STORE_QUEUE_MAX
        ) -> Replica:
            nonlocal count
            count += 1
            clock = SystemClock()
            ids = IdSource(clock)
            metrics = Metrics(f"job_store_{count}")
            bus = await stack.enter_async_context(Bus(nats_url, name="test", metrics=metrics))
            meter = PrometheusMeter(metrics)
            announcer = NatsAnnouncer(bus)
            relay = Relay(PostgresOutbox(database), JetStreamLifecycle(bus), meter)
            group_commit = await stack.enter_async_context(
                GroupCommit(
                    PostgresJournal(database, ids, encode_event),
                    announcer,
                    meter,
                    monotonic=clock.monotonic,
                    lifecycle_written=relay.wake,
                )
            )
            ledger = Ledger(
                group_commit=group_commit,
                leases=PostgresLeases(database, places, crashes_max=CRASHES_MAX),
                reads=PostgresReads(database),
                offer_book=PostgresOfferBook(database),
                attention_book=PostgresAttentionBook(database),
                announcer=announcer,
                crashes_max=CRASHES_MAX,
            )
            if nats_url is not None:
                background = await stack.enter_async_context(Background())
                background.start("relay", relay.run)
            address = f"unix:{tmp_path}/{count}"
            server = RpcServer(
                address,
                authenticator=Anybody(),
                ids=ids,
                metrics=metrics,
                message_bytes_max=32 * 1024 * 1024,
            )
            server.add(
                add_LedgerServiceServicer_to_server,
                _servicer(ledger, places, store_queue_max),
                service_only=True,
            )
            await stack.enter_async_context(server)
            channel = await stack.enter_async_context(open_channel(address, message_bytes_max=32 * 1024 * 1024))
            return Replica(
                stub=LedgerServiceStub(channel),
                ledger=ledger,
                database=database,
                bus=bus,
                relay=relay,
                metrics=metrics,
                group_commit=group_commit,
            )

        yield start_one


def _servicer(ledger: Ledger, places: PlaceLimits, store_queue_max: int) -> LedgerServicer:
    return LedgerServicer(ledger, queue_max=QUEUE_MAX, store_queue_max=store_queue_max, store_places=places.per_store)


@pytest.fixture
async def replica(start: StartReplica) -> Replica:
    """A job store without NATS."""
    return await start()


@pytest.fixture
def stub(replica: Replica) -> LedgerServiceAsyncStub:
    """Its API."""
    return replica.stub


@pytest.fixture
def user(stub: LedgerServiceAsyncStub) -> User:
    """ann of acme, with a worker that drives her runs."""
    return User(stub)


async def eventually(check: Callable[[], Awaitable[bool]], *, seconds: float = 10.0) -> None:
    """Return when `check` is true; fail when it is not in time."""
    async with asyncio.timeout(seconds):
        while not await check():
            await asyncio.sleep(0.02)
