"""A notifier over gRPC, with a real database and without NATS: inboxes and both loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import grpc
import pytest

from pawl.chassis.ids import ConversationId, IdSource, RunId, StoreId, UserId
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.tasks import end
from pawl.chassis.rpc.limits import Limits
from pawl.notifier.channels.rules import ChannelKind
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.senders import Emails, SignedPosts
from pawl.notifier.deliveries.store import PostgresDeliveries
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationKind, notification_id
from pawl.notifier.inbox.store import SCHEMA, PostgresStore
from pawl.notifier.inbox.subscription import Subscriptions
from pawl.notifier.metrics import PrometheusCounters
from pawl.notifier.preferences.store import PostgresPreferences
from pawl.notifier.wiring import Notifier, wire
from pawl.notify.v1 import channel_pb2, notify_pb2
from pawl.notify.v1.channel_pb2_grpc import ChannelServiceStub
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.notify.v1.preference_pb2_grpc import PreferenceServiceStub
from pawl.server.bus.connection import Bus
from pawl.server.db.database import Database
from pawl.server.egress.addresses import Lookups
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.mail import SmtpServer
from pawl.server.egress.policy import read_rules
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from tests import databases
from tests.fakes.session_agent import OpenAuthenticator
from tests.poll import until
from tests.rpc.stubs import ChannelServiceAsyncStub, NotifyServiceAsyncStub, PreferenceServiceAsyncStub
from tests.web_server import Names, Reply, WebServer, web_server

HEARTBEAT_SECONDS = 0.2
SENDER = "pawl@example.com"
PUBLIC_URL = "https://pawl.example.com"
HOSTS = ("slow.test", "other.test")


@pytest.fixture(scope="session")
def notifier_database(postgres_url: str) -> Iterator[databases.ServiceDatabase]:
    with databases.ServiceDatabase(postgres_url, SCHEMA) as database:
        yield database


@pytest.fixture
def database_url(notifier_database: databases.ServiceDatabase) -> str:
    notifier_database.empty()
    return notifier_database.url


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    async with Database(database_url, application_name="test") as database:
        await database.create_schema(SCHEMA)
        yield database


@pytest.fixture
def store(database: Database) -> PostgresStore:
    return PostgresStore(database)


@pytest.fixture
async def receiver() -> AsyncIterator[WebServer]:
    async with web_server(lambda _: Reply()) as server:
        yield server


@pytest.fixture
def egress(receiver: WebServer) -> GuardedEgress:
    """An egress that resolves only the receiver's three names."""
    rules = read_rules(["example.com"], [f"{host}:{receiver.port}" for host in ("127.0.0.1", *HOSTS)])
    names = Names({host: ["127.0.0.1"] for host in HOSTS})
    return GuardedEgress({"*": rules}, lookups=Lookups(names), tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


class Repository(PostgresChannels, PostgresDeliveries):
    """The stores of channels and deliveries in one object."""


def wired(
    database: Database, egress: GuardedEgress, mail_server: SmtpServer | None = None, gone_keys: Collection[str] = ()
) -> Notifier:
    """Return a replica whose loops are not yet running."""
    ids = IdSource(SystemClock())
    return wire(
        store=PostgresStore(database),
        channels=PostgresChannels(database),
        preferences=PostgresPreferences(database),
        queue=PostgresDeliveries(database),
        senders={
            ChannelKind.WEBHOOK: SignedPosts(egress, SystemClock()),
            ChannelKind.EMAIL: Emails(mail_server, SENDER, SystemClock(), PUBLIC_URL),
        },
        sends_email=mail_server is not None,
        egress=egress,
        ids=ids,
        bus=create_autospec(Bus),
        counters=PrometheusCounters(Metrics("notifier")),
        clock=SystemClock(),
        key_is_gone=lambda principal: principal.credential_id in gone_keys,
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )


@pytest.fixture
def mail_server() -> SmtpServer | None:
    return None


@pytest.fixture
def gone_keys() -> set[str]:
    return set()


@pytest.fixture
async def notifier(
    database: Database,
    egress: GuardedEgress,
    mail_server: SmtpServer | None,
    gone_keys: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Notifier]:
    # Tests write to the store directly, which wakes no loop.
    monkeypatch.setattr("pawl.notifier.deliveries.deliveries._SWEEP_SECONDS", 0.02)
    notifier = wired(database, egress, mail_server, gone_keys)
    running = [asyncio.create_task(each.run()) for each in (notifier.subscriptions, notifier.deliveries)]
    yield notifier
    await end(running)


@pytest.fixture
def subscriptions(notifier: Notifier) -> Subscriptions:
    return notifier.subscriptions


@pytest.fixture
async def channel(notifier: Notifier, tmp_path: Path, ids: IdSource) -> AsyncIterator[grpc.aio.Channel]:
    address = f"unix:{tmp_path}/grpc"
    server = RpcServer(
        address,
        authenticator=OpenAuthenticator(),
        ids=ids,
        metrics=Metrics("notifier_rpc"),
        limits=Limits(message_bytes_max=64 * 1024),
    )
    notifier.add_to(server)
    async with server, grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> NotifyServiceAsyncStub:
    return NotifyServiceStub(channel)


@pytest.fixture
def channels(channel: grpc.aio.Channel) -> ChannelServiceAsyncStub:
    return ChannelServiceStub(channel)


@pytest.fixture
def preferences(channel: grpc.aio.Channel) -> PreferenceServiceAsyncStub:
    return PreferenceServiceStub(channel)


@pytest.fixture
def draft() -> Callable[..., Draft]:
    def make(event: str, *, user: str = "ann", store: str = "acme", body: str = "", traceparent: str = "") -> Draft:
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
            traceparent=traceparent,
        )

    return make


@pytest.fixture
def desk(
    channels: ChannelServiceAsyncStub, stub: NotifyServiceAsyncStub, receiver: WebServer, database: Database
) -> Desk:
    return Desk(channels, stub, receiver, database)


DELIVERED, DEAD, WAITING, SKIPPED = (
    channel_pb2.CHANNEL_DELIVERY_STATE_DELIVERED,
    channel_pb2.CHANNEL_DELIVERY_STATE_DEAD,
    channel_pb2.CHANNEL_DELIVERY_STATE_WAITING,
    channel_pb2.CHANNEL_DELIVERY_STATE_SKIPPED,
)
ANN = (("pawl-store", "acme"), ("pawl-user", "ann"))
BOB = (("pawl-store", "acme"), ("pawl-user", "bob"))
ANN_ELSEWHERE = (("pawl-store", "other"), ("pawl-user", "ann"))
URL = "https://example.com/hook"
_AT_WORK = "SELECT count(*) FROM notifier.webhook_deliveries WHERE claimed OR due_time <= now()"


async def created(
    channels: ChannelServiceAsyncStub, url: str = URL, *, request_id: str = "", **fields: object
) -> channel_pb2.CreateChannelResponse:
    channel = channel_pb2.Channel(url=url, **fields)  # type: ignore[arg-type]
    return await channels.CreateChannel(
        channel_pb2.CreateChannelRequest(channel=channel, request_id=request_id), metadata=ANN
    )


@dataclass
class Desk:
    stub: ChannelServiceAsyncStub
    inboxes: NotifyServiceAsyncStub
    receiver: WebServer
    database: Database

    async def hook(self, path: str = "/", host: str = "127.0.0.1", **fields: Any) -> tuple[str, str]:
        made = await created(self.stub, f"http://{host}:{self.receiver.port}{path}", **fields)
        return made.channel.channel_id, made.secret

    async def channel(self, channel_id: str) -> channel_pb2.Channel:
        return (await self.stub.GetChannel(channel_pb2.GetChannelRequest(channel_id=channel_id), metadata=ANN)).channel

    async def deliveries(self, channel_id: str) -> list[channel_pb2.ChannelDelivery]:
        request = channel_pb2.ListDeliveriesRequest(channel_id=channel_id)
        return list((await self.stub.ListDeliveries(request, metadata=ANN)).deliveries)

    async def delivery(self, channel_id: str, *, tries: int) -> channel_pb2.ChannelDelivery:
        async def has_ended() -> bool:
            (each,) = await self.deliveries(channel_id)
            return each.tries == tries and await self.is_idle()

        await until(has_ended)
        (found,) = await self.deliveries(channel_id)
        return found

    async def settled_delivery(self, channel_id: str) -> channel_pb2.ChannelDelivery:
        await until(self.is_idle)
        (found,) = await self.deliveries(channel_id)
        return found

    async def is_idle(self) -> bool:
        return bool(await self.database.fetchval(_AT_WORK) == 0)

    async def change(self, channel_id: str, **fields: Any) -> channel_pb2.Channel:
        request = channel_pb2.UpdateChannelRequest(channel_id=channel_id, **fields)
        return (await self.stub.UpdateChannel(request, metadata=ANN)).channel

    async def resend(self, delivery: channel_pb2.ChannelDelivery) -> channel_pb2.ChannelDelivery:
        request = channel_pb2.ResendDeliveryRequest(delivery_id=delivery.delivery_id)
        return (await self.stub.ResendDelivery(request, metadata=ANN)).delivery

    async def test(self, channel_id: str) -> channel_pb2.ChannelDelivery:
        return (
            await self.stub.TestChannel(channel_pb2.TestChannelRequest(channel_id=channel_id), metadata=ANN)
        ).delivery

    async def inbox(self) -> list[notify_pb2.Notification]:
        request = notify_pb2.ListNotificationsRequest()
        return list((await self.inboxes.ListNotifications(request, metadata=ANN)).notifications)

    async def hurry(self) -> None:
        await self.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time > now()")
