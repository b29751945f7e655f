"""A notifier over real gRPC and a real database, without NATS: the inboxes and the two loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.chassis.clock import SystemClock
from pawl.chassis.database import Database
from pawl.chassis.ids import ConversationId, IdSource, RunId, StoreId, UserId
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_limits import Limits
from pawl.chassis.rpc_server import RpcServer
from pawl.notifier.adapters.metrics import PrometheusCounters
from pawl.notifier.adapters.postgres import MIGRATIONS, SCHEMA, PostgresStore
from pawl.notifier.app.subscription import Subscriptions
from pawl.notifier.domain.announcement import notification_id
from pawl.notifier.domain.notification import Draft, EventId, Inbox, Notification, NotificationKind
from pawl.notifier.wiring import Notifier, wire
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from tests import databases
from tests.fakes.anybody import Anybody

if TYPE_CHECKING:
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

HEARTBEAT_SECONDS = 0.2


@pytest.fixture(scope="session")
def notifier_database(postgres_url: str) -> Iterator[databases.ServiceDatabase]:
    """A migrated database."""
    with databases.ServiceDatabase(postgres_url, SCHEMA) as database:
        yield database


@pytest.fixture
def database_url(notifier_database: databases.ServiceDatabase) -> str:
    """The URL of a database whose tables are empty."""
    notifier_database.empty()
    return notifier_database.url


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    async with Database(database_url, application_name="test") as database:
        await database.migrate(SCHEMA, MIGRATIONS)
        yield PostgresStore(database)


class Silent:
    """An announcer that nobody hears."""

    async def announce(self, notifications: Sequence[Notification]) -> None: ...


@pytest.fixture
async def notifier(store: PostgresStore) -> AsyncIterator[Notifier]:
    """A notifier that looks for what is new."""
    notifier = wire(
        store=store,
        announcer=Silent(),
        counters=PrometheusCounters(Metrics("notifier")),
        clock=SystemClock(),
        keep_days=30,
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )
    polling = asyncio.create_task(notifier.subscriptions.run())
    yield notifier
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)


@pytest.fixture
def subscriptions(notifier: Notifier) -> Subscriptions:
    return notifier.subscriptions


@pytest.fixture
async def stub(notifier: Notifier, tmp_path: Path, ids: IdSource) -> AsyncIterator[NotifyServiceAsyncStub]:
    address = f"unix:{tmp_path}/grpc"
    server = RpcServer(
        address,
        authenticator=Anybody(),
        ids=ids,
        metrics=Metrics("notifier_rpc"),
        limits=Limits(message_bytes_max=64 * 1024),
    )
    notifier.add_to(server)
    async with server, grpc.aio.insecure_channel(address) as channel:
        yield NotifyServiceStub(channel)


@pytest.fixture
def draft() -> Callable[..., Draft]:
    """Makes drafts: `draft("a")` is about event a, for ann of acme."""

    def make(event: str, *, user: str = "ann", store: str = "acme", body: str = "") -> Draft:
        return Draft(
            inbox=Inbox(store_id=StoreId(store), user_id=UserId(user)),
            notification_id=notification_id(EventId(event)),
            kind=NotificationKind.RUN_COMPLETED,
            run_id=RunId("run_1"),
            conversation_id=ConversationId("conv_1"),
            event_id=EventId(event),
            title=f"About {event}",
            body=body,
            create_time=datetime(2026, 5, 1, tzinfo=UTC),
        )

    return make
