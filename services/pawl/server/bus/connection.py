"""The connection to NATS, which may be unavailable.

Nothing here waits for the server or fails because of it. NATS carries wake-ups and live events, but never durable
state. Without NATS, Pawl is slower but still correct.

nats-py's own reconnection is disabled. It does not cover the first connection, stops permanently after one refused
login (which a restarting server can cause), and fails silently after an unexpected error. Instead, a loop here creates
a new client for each connection and subscribes again.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Self

import nats.errors
import nats.js.errors
from nats.aio.client import DEFAULT_MAX_PAYLOAD_SIZE, Client
from nats.js import JetStreamContext

from pawl.chassis.process import logs, tasks
from pawl.errors import DependencyUnavailable
from pawl.server.bus import outbox as bus_outbox
from pawl.server.bus.outbox import Callback, Outbox, Subscription
from pawl.server.process.metrics import Metrics

_CONNECT_TIMEOUT_SECONDS: Final = 3
_BACKOFF_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_PING_INTERVAL_SECONDS: Final = 5
# nats-py closes a connection after three PINGs without a PONG.
_PONG_SECONDS_MAX: Final = 10 * _PING_INTERVAL_SECONDS
_FLUSH_TIMEOUT_SECONDS: Final = 1.0
_CRASH_PAUSE_SECONDS: Final = 1.0
# The server's limit includes the headers of a message.
_HEADER_BYTES: Final = 1024

_log = logs.get_logger(__name__)

Hook = Callable[[], Awaitable[None]]


async def flush(client: Client) -> None:
    """Return once the server has received all earlier messages and subscriptions.

    nats-py's own `flush` writes its PING ahead of buffered data, which may then reach the server after the PONG, or
    never. A PONG that nothing awaits ends nats-py's reader. Therefore, if the caller is cancelled, the wait continues
    until the PONG arrives or the connection is lost.
    """
    await tasks.shield(_flushed(client))


async def _flushed(client: Client) -> None:
    while client.pending_data_size:
        await client.flush(_PONG_SECONDS_MAX)
    await client.flush(_PONG_SECONDS_MAX)


class _Client(Client):
    """A NATS client that always reports a lost connection and never sends plaintext to a `tls://` URL.

    nats-py trusts the server's greeting, which a man in the middle can forge, and would then send the password in
    plaintext. When a connection is lost, nats-py tries to send buffered data. If that fails, nats-py never reports the
    loss.
    """

    is_clustered = False

    async def _process_op_err(self, e: Exception) -> None:
        self._pending, self._pending_data_size = [], 0
        await super()._process_op_err(e)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        if self._current_server is not None and self._current_server.uri.scheme == "tls":
            info["tls_required"] = True
        self.is_clustered = bool(info.get("cluster"))
        await super()._process_info(info, initial_connection)


class Bus:
    """A connection to NATS. Entering the async context manager does not wait for the connection.

    `url` contains one or more `nats://user:password@host:port` URLs, separated by commas. None disables the bus. `name`
    appears in NATS monitoring. With `tls://`, nothing is sent before the server has presented a valid certificate for
    its host. `tls` creates the TLS context of each connection. By default, the system's CA certificates are trusted.
    """

    def __init__(
        self, url: str | None, *, name: str, metrics: Metrics, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        # False if there is no NATS server at all, so nothing will ever be sent.
        self.is_configured = url is not None
        # Counts connections; a new number may mean a different server.
        self.connection_number = 0
        # The largest payload with a few headers, as announced on the last connection.
        self.payload_bytes_max = DEFAULT_MAX_PAYLOAD_SIZE - _HEADER_BYTES
        self._url = url
        self._name = name
        self._tls = tls
        self._subscriptions: set[Subscription] = set()
        self._hooks: list[Hook] = []
        self._hook_tasks: set[asyncio.Task[None]] = set()
        self._client: Client | None = None
        self._connected = asyncio.Event()
        self._tried = asyncio.Event()
        self._outbox = Outbox(metrics)
        self._task: asyncio.Task[None] | None = None
        self._gauge = metrics.gauge("bus_connected", "Whether NATS is connected: 1 or 0.")

    async def __aenter__(self) -> Self:
        if self._url is not None:
            self._task = asyncio.get_running_loop().create_task(self._stay_connected(self._url), name="bus")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await tasks.end([self._task])
            self._task = None

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    @property
    def is_clustered(self) -> bool:
        """True if the server of the current connection belongs to a cluster."""
        return isinstance(self._client, _Client) and self._client.is_clustered

    async def wait_connected(self) -> None:
        """Wait until the bus is connected, which may never happen."""
        await self._connected.wait()

    async def ping(self) -> None:
        """Check the connection. Waits while the first attempt to connect is in progress.

        Raises:
            DependencyUnavailable: NATS is not connected.
        """
        if self._url is not None:
            await self._tried.wait()
        if not self.connected:
            raise DependencyUnavailable("NATS is not connected")

    async def publish(self, subject: str, data: bytes) -> None:
        """Publish a message at most once. Never waits for the server, and never raises if it is unavailable.

        Messages are dropped and counted while the bus is not connected or the outbox is full.
        """
        if self.connected:
            self._outbox.put(subject, data)
        else:
            self._outbox.drop()

    async def publish_all(
        self, messages: Iterable[tuple[str, bytes, Mapping[str, str]]], *, timeout_seconds: float = 5.0
    ) -> None:
        """Publish (subject, data, headers) messages in order, and return once the server has received all of them.

        Messages over the server's size limit are dropped and counted.

        Raises:
            DependencyUnavailable: NATS is not connected, or the connection was lost after some messages were sent.
        """
        client, count = self._connected_client(), 0
        try:
            for subject, data, headers in messages:
                if len(data) > self.payload_bytes_max:
                    # This message can never be sent, but the next ones can.
                    self._outbox.refuse(subject, "MaxPayloadError")
                    continue
                await client.publish(subject, data, headers=dict(headers))
                count += 1
            async with asyncio.timeout(timeout_seconds):
                await flush(client)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise DependencyUnavailable(f"NATS did not accept the messages: {type(error).__name__}") from error
        self._outbox.published.inc(count)

    async def subscribe(self, subject: str, callback: Callback) -> Subscription:
        """Call `callback` with the subject and data of each message on `subject`, one at a time, in order.

        The subscription survives reconnects, but messages that are published while the bus is disconnected are missed.
        Exceptions raised by the callback are logged.
        """
        subscription = Subscription(subject, callback, self._subscriptions.discard)
        self._subscriptions.add(subscription)
        if self._client is not None:
            try:
                await subscription.establish(self._client)
            except (nats.errors.Error, OSError) as error:
                # The connection is breaking; the next one subscribes.
                _log.debug("bus.subscribe_later", subject=subject, error=type(error).__name__)
        return subscription

    def on_connected(self, hook: Hook) -> None:
        """Run `hook` in its own task on each connection, including the current one.

        The hook may run for as long as the connection lasts, for example to consume messages. When the connection is
        lost, the hook is cancelled. If the hook raises, it runs again after a pause.
        """
        self._hooks.append(hook)
        if self.connected:
            self._start_hook(hook)

    def jetstream(self) -> JetStreamContext:
        """Return the JetStream context of the current connection. After a reconnect, call this again.

        Raises:
            DependencyUnavailable: NATS is not connected.
        """
        return self._connected_client().jetstream()

    def _connected_client(self) -> Client:
        if self._client is None or not self.connected:
            raise DependencyUnavailable("NATS is not connected")
        return self._client

    async def _stay_connected(self, url: str) -> None:
        failures = 0
        while True:
            closed = asyncio.Event()
            client = _Client()
            try:
                await self._connect(client, url, closed)
                failures = 0
                await self._use(client, closed)
                _log.warning("bus.disconnected")
            except (nats.errors.Error, OSError, TimeoutError) as error:
                if failures == 0:
                    _log.warning("bus.unreachable", error=str(error) or type(error).__name__)
                failures += 1
            except Exception:  # noqa: BLE001  # retry whatever the client library raises
                _log.exception("bus.failed")
                failures += 1
            finally:
                await self._close(client)
            tasks.check_cancelled()
            pause = _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS) - 1)]
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311  # spreads replicas

    async def _connect(self, client: Client, url: str, closed: asyncio.Event) -> None:
        async def on_closed() -> None:
            closed.set()

        async def on_error(error: Exception) -> None:
            # Failed attempts arrive here too; the loop reports them.
            _log.debug("bus.error", error=str(error) or type(error).__name__)

        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            await client.connect(
                [part.strip() for part in url.split(",")],
                name=self._name,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=_CONNECT_TIMEOUT_SECONDS,
                ping_interval=_PING_INTERVAL_SECONDS,
                pending_size=bus_outbox.BYTES_MAX,
                tls=self._tls() if self._tls else None,
                error_cb=on_error,
                closed_cb=on_closed,
            )

    async def _use(self, client: Client, closed: asyncio.Event) -> None:
        self._client = client
        self.connection_number += 1
        self.payload_bytes_max = max(0, client.max_payload - _HEADER_BYTES)
        for subscription in list(self._subscriptions):
            await subscription.establish(client)
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            await flush(client)
        tasks.check_cancelled()
        self._connected.set()
        self._tried.set()
        self._gauge.set(1)
        _log.info(
            "bus.connected", server=client.connected_url.netloc.rpartition("@")[2] if client.connected_url else ""
        )
        for hook in self._hooks:
            self._start_hook(hook)
        sender = asyncio.get_running_loop().create_task(self._outbox.send(client), name="bus.send")
        waiter = asyncio.get_running_loop().create_task(closed.wait(), name="bus.closed")
        try:
            await asyncio.wait({sender, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            self._connected.clear()
            await self._drain(client)
            await tasks.end([sender, waiter])
            self._outbox.clear()

    async def _drain(self, client: Client) -> None:
        if client.is_closed:
            return
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_SECONDS):
                await self._outbox.messages.join()
                await flush(client)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            _log.debug("bus.flush_failed", error=type(error).__name__)

    async def _close(self, client: Client) -> None:
        self._connected.clear()
        self._tried.set()
        self._client = None
        self._gauge.set(0)
        await tasks.end(self._hook_tasks)
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_SECONDS):
                await client.close()
        except (nats.errors.Error, OSError, TimeoutError, AssertionError) as error:
            # A client that never connected cannot close.
            _log.debug("bus.close_failed", error=type(error).__name__)

    def _start_hook(self, hook: Hook) -> None:
        async def run() -> None:
            while True:
                try:
                    await hook()
                except Exception:  # noqa: BLE001  # restart a crashed consumer
                    _log.exception("bus.hook_failed")
                    await asyncio.sleep(_CRASH_PAUSE_SECONDS)
                else:
                    return

        tasks.start(self._hook_tasks, run(), name="bus.hook")
