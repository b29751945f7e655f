"""A notifier over real gRPC and a real database, without NATS: the inboxes and the two loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.metrics import Metrics
from pawl.chassis.rpc_server import RpcServer
from pawl.notifier.adapters.metrics import PrometheusCounters
from pawl.notifier.adapters.postgres import MIGRATIONS, SCHEMA, PostgresStore
from pawl.notifier.app.subscription import Subscriptions
from pawl.notifier.domain.announcement import notification_id
from pawl.notifier.domain.notification import (
    ConversationId,
    Draft,
    EventId,
    Inbox,
    NotificationKind,
    RunId,
    StoreId,
    UserId,
)
from pawl.notifier.rpc.servicer import Notify
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub, add_NotifyServiceServicer_to_server
from tests.fakes.anybody import Anybody

if TYPE_CHECKING:
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

HEARTBEAT_SECONDS = 0.2


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    async with Database(database_url, application_name="test") as database:
        await database.migrate(SCHEMA, MIGRATIONS)
        yield PostgresStore(database)


@pytest.fixture
async def subscriptions(store: PostgresStore) -> AsyncIterator[Subscriptions]:
    subscriptions = Subscriptions(store, PrometheusCounters(Metrics("notifier")))
    polling = asyncio.create_task(subscriptions.run())
    yield subscriptions
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)


@pytest.fixture
async def stub(
    store: PostgresStore, subscriptions: Subscriptions, tmp_path: Path, ids: IdSource
) -> AsyncIterator[NotifyServiceAsyncStub]:
    address = f"unix:{tmp_path}/grpc"
    server = RpcServer(
        address,
        authenticator=Anybody(),
        ids=ids,
        metrics=Metrics("notifier_rpc"),
        message_bytes_max=64 * 1024,
    )
    notify = Notify(store, subscriptions, heartbeat_seconds=HEARTBEAT_SECONDS)
    server.add(add_NotifyServiceServicer_to_server, notify)
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
