"""Real notifier processes on a real PostgreSQL and a NATS of the test's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from pawl.chassis.bus.connection import flush
from pawl.event.v1 import event_pb2, run_pb2
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from tests.keys import ENVIRONMENT, keyed_channel
from tests.servers import NatsServer

_WAIT_SECONDS = 240.0


class Replica:
    """One notifier process."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._environment = environment
        self._folder = folder
        self._addresses = folder / "addresses.json"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it; returns when it listens."""
        self._addresses.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220  # returns as soon as it is forked
                [sys.executable, "-m", "pawl.notifier"],
                env=self._environment | {"PAWL_ADDRESS_FILE": str(self._addresses)},
                stderr=log,
            )
        async with asyncio.timeout(_WAIT_SECONDS):
            while not self._addresses.exists():
                assert self._process.poll() is None, (self._folder / "log").read_text()
                await asyncio.sleep(0.02)

    @property
    def address(self) -> str:
        address: str = json.loads(self._addresses.read_text())["grpc"]
        return address

    def kill(self) -> None:
        """End it like a power cut."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it in order; returns the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        return process.wait(_WAIT_SECONDS)


class Suite:
    """NATS, a database and any number of replicas; plays job-store's part of the life cycle."""

    def __init__(self, database_url: str, server: NatsServer, folder: Path) -> None:
        self.nats = server
        self._database_url = database_url
        self._folder = folder
        self._replicas: list[Replica] = []
        self._client: Client | None = None

    async def replica(self) -> Replica:
        """Start one more."""
        folder = self._folder / f"replica-{len(self._replicas)}"
        folder.mkdir()
        replica = Replica(
            dict(os.environ)
            | ENVIRONMENT
            | {"PAWL_DATABASE_URL": self._database_url, "PAWL_NATS_URL": self.nats.url}
            # There is none: callers have the local key.
            | {"PAWL_JOB_STORE_ADDRESS": "127.0.0.1:1"}
            | {"PAWL_LISTEN": "127.0.0.1:0", "PAWL_METRICS_LISTEN": "127.0.0.1:0", "PAWL_DATABASE_UNSAFE": "true"},
            folder,
        )
        self._replicas.append(replica)
        await replica.start()
        return replica

    async def connect(self) -> Client:
        """A connection as another service or an outside subscriber would have it."""
        if self._client is None or not self._client.is_connected:
            self._client = await nats.connect(self.nats.url, allow_reconnect=False)
        return self._client

    async def create_stream(self) -> None:
        """Create the stream as job-store does."""
        client = await self.connect()
        await client.jetstream().add_stream(name="PAWL_LIFECYCLE", subjects=["pawl.v1.*.lifecycle.*"])

    async def emit(self, event_id: str, *, user: str = "ann", deduplicate: bool = True) -> None:
        """Publish run.completed as the outbox does; without `deduplicate` as if its window had passed."""
        event = event_pb2.RunEvent(
            store_id="acme", conversation_id="conv_1", run_id=f"run_{event_id}", event_id=event_id, type="run.completed"
        )
        event.time.FromDatetime(datetime(2026, 5, 1, tzinfo=UTC))
        event.run_changed.run.user_id = user
        event.run_changed.run.state = run_pb2.RUN_STATE_COMPLETED
        headers = {"Nats-Msg-Id": event_id} if deduplicate else None
        await self.emit_bytes(event.SerializeToString(), headers)

    async def emit_bytes(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        client = await self.connect()
        await client.jetstream().publish("pawl.v1.acme.lifecycle.completed", data, headers=headers)

    async def execute(self, statement: str) -> None:
        """Change the database."""
        connection = await asyncpg.connect(self._database_url)
        await connection.execute(statement)
        await connection.close()

    async def close(self) -> None:
        if self._client is not None and not self._client.is_closed:
            await self._client.close()
        for replica in self._replicas:
            replica.kill()


class Listener:
    """A subscriber to ann's subject that keeps all it hears."""

    def __init__(self) -> None:
        self.heard: list[notify_pb2.Notification] = []
        self.ids: list[str] = []

    async def on_message(self, message: Msg) -> None:
        self.heard.append(notify_pb2.Notification.FromString(message.data))
        self.ids.append((message.headers or {})["Nats-Msg-Id"])

    async def until(self, count: int) -> list[str]:
        """The events heard of, as soon as there are `count`; one may be heard of twice."""
        async with asyncio.timeout(_WAIT_SECONDS):
            while len(set(self.ids)) < count:
                await asyncio.sleep(0.02)
        return [notification.event_id for notification in self.heard]


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    folder = tmp_path / "nats"
    folder.mkdir()
    with NatsServer(folder) as server:
        yield server


@pytest.fixture
async def suite(database_url: str, own_nats: NatsServer, tmp_path: Path) -> AsyncIterator[Suite]:
    suite = Suite(database_url, own_nats, tmp_path)
    yield suite
    await suite.close()


async def listen(suite: Suite) -> Listener:
    listener = Listener()
    client = await suite.connect()
    await client.subscribe("pawl.v1.acme.user.ann.notifications", cb=listener.on_message)
    await flush(client)
    return listener


async def inbox(replica: Replica, count: int, user: str = "ann") -> list[str]:
    """The events of a user's inbox, old to new, as soon as it has `count`."""
    metadata = (("pawl-store", "acme"), ("pawl-user", user))
    events: list[str] = []
    async with keyed_channel(replica.address) as channel, asyncio.timeout(_WAIT_SECONDS):
        stub = NotifyServiceStub(channel)
        while len(events) < count:
            response = await stub.ListNotifications(
                notify_pb2.ListNotificationsRequest(page_size=200), metadata=metadata
            )
            events = [notification.event_id for notification in reversed(response.notifications)]
            await asyncio.sleep(0.02)
    return events
