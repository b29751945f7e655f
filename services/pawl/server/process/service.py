"""The code that the main functions of all services share.

async def main(stop: asyncio.Event) -> None:
    settings = load(JobStoreSettings)
    async with Service("job_store", settings) as service:
        database = await service.open_database()
        await service.create_schema(database, "job_store")
        bus = await service.open_bus()
        server = service.rpc_server(keys)
        server.add(add_LedgerServiceServicer_to_server, Ledger(...), service_only=True)
        await service.serve(server, stop)

if __name__ == "__main__":
    run_service(main)
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import grpc
import msgspec
import uvloop

from pawl.chassis.ids import IdSource
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.address import is_loopback
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc import tls
from pawl.chassis.rpc.client import PEER_MESSAGE_BYTES_MAX, open_channel
from pawl.chassis.rpc.limits import Limits
from pawl.chassis.rpc.status import from_rpc_error
from pawl.errors import DeadlineExceeded, DependencyUnavailable, Internal, Unavailable
from pawl.server.identity.credentials import authenticator, read_issuers, service_key
from pawl.server.identity.key_rows import KeyRows, KeySource
from pawl.server.process import log_setup
from pawl.server.process.http_server import HealthMonitor, HttpServer, Response, application
from pawl.server.process.metrics import CONTENT_TYPE, Metrics
from pawl.server.process.settings import ServiceSettings
from pawl.server.rpc.health import ping
from pawl.server.rpc.server import RpcServer

if TYPE_CHECKING:
    from pawl.server.bus.connection import Bus
    from pawl.server.db.database import Database
    from pawl.server.process.tracing import Tracer

# Services without a database or NATS do not import their drivers, which take megabytes.
# ruff: noqa: PLC0415

_RESTART_SECONDS: Final = (0.1, 0.5, 1.0, 5.0)
# A loop that ran this long before it crashed restarts after the shortest pause.
_HEALTHY_SECONDS: Final = 30.0
# How long a process that has just started waits for services that it calls.
_PEERS_SECONDS: Final = 3.0
_EXIT_USAGE: Final = 2
_REPORT_SECONDS: Final = 60.0
# New objects until the next garbage collection; 700 is the default.
_COLLECTED_AFTER: Final = 5_000

_log = logs.get_logger(__name__)


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` on uvloop until it returns, then end the process.

    SIGTERM and SIGINT set the event passed to `main`. A second signal ends the process immediately. The exit code is 0
    if `main` returned and every task failure was handled, 2 after a StartError, and 1 otherwise. Code 2 means that a
    restart without changes will fail again. StartError and DependencyUnavailable are logged as one sentence without a
    traceback.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(main))
    sys.exit(code)


async def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stop, reason = asyncio.Event(), ""
    loop = asyncio.get_running_loop()
    failed_unseen = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal reason
        if stop.is_set():
            os._exit(128 + number)
        _log.info("process.stopping", signal=number.name)
        reason = number.name
        stop.set()

    def on_unseen(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal failed_unseen
        failed_unseen = True
        _log.error("task.failed", detail=context.get("message", ""), exc_info=context.get("exception"))

    loop.set_exception_handler(on_unseen)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    except (StartError, DependencyUnavailable) as error:
        _log.critical("process.failed", error=str(error))
        return _EXIT_USAGE if isinstance(error, StartError) else 1
    except Exception:  # noqa: BLE001  # the last place that can log it
        _log.critical("process.failed", exc_info=True)
        return 1
    _log.info("process.stopped", reason=reason)
    return int(failed_unseen)


class Background:
    """Supervised loops that run alongside the server. An async context manager that cancels them on exit.

    A loop that crashes is restarted after a delay that grows from 0.1 s to 5 s. A loop that returns is not restarted.
    Crashes are logged with a traceback. An unavailable dependency is logged in one line, at most once a minute for all
    loops.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._reported_at = float("-inf")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end(self._tasks)

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        tasks.start(self._tasks, self._supervise(name, loop), name=name)

    async def _supervise(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        clock = asyncio.get_running_loop()
        crashes = 0
        while True:
            started = clock.time()
            try:
                await loop()
            except (Unavailable, DeadlineExceeded, Internal) as error:
                is_news = clock.time() - self._reported_at >= _REPORT_SECONDS
                (_log.warning if is_news else _log.debug)("background.interrupted", task=name, error=error.message)
                self._reported_at = clock.time() if is_news else self._reported_at
            except Exception:  # noqa: BLE001  # a crashed loop is restarted
                _log.exception("background.crashed", task=name)
            else:
                return
            tasks.check_cancelled()
            crashes = 1 if clock.time() - started > _HEALTHY_SECONDS else crashes + 1
            await asyncio.sleep(_RESTART_SECONDS[min(crashes, len(_RESTART_SECONDS)) - 1])


T = TypeVar("T")


class Service:
    """The resources of one service process. An async context manager.

    On exit, it cancels the `background` loops and then closes everything that was opened through it, in reverse order.
    `serve` drains the calls first, so loops that calls depend on (for example, a group commit) run until the last call.
    """

    def __init__(self, name: str, settings: ServiceSettings) -> None:
        self.name = name
        self.instance_id = f"i-{secrets.token_hex(4)}"
        self.clock = SystemClock()
        self.ids = IdSource(self.clock)
        self.metrics = Metrics(name)
        self.health = HealthMonitor()
        self.background = Background()
        self.key_rows: KeyRows | None = None
        self._settings = settings
        self._peers_end = time.monotonic() + _PEERS_SECONDS
        self._stack = AsyncExitStack()
        log_setup.configure(service=name, instance_id=self.instance_id, level=settings.log_level, log_format="auto")
        self.tls = tls.of_service(
            settings.tls_certificate_file, settings.tls_key_file, settings.tls_ca_file, clock=self.clock
        )
        if self.tls is not None:
            tls.check_own(self.tls(), name.replace("_", "-"), is_called=settings.internal_listen is not None)

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        # Stop the loops first, because they use resources of the stack.
        await self.background.__aexit__(*error)
        await self._stack.__aexit__(*error)  # type: ignore[arg-type]  # as given to us

    async def enter(self, part: AbstractAsyncContextManager[T]) -> T:
        return await self._stack.enter_async_context(part)

    async def open_database(self) -> Database:
        """Return the connected database. The service's health depends on it.

        Raises:
            StartError: PAWL_DATABASE_URL is missing or is not the URL of a database, or the database is not durable
                (see `durability`).
        """
        from pawl.server.db.database import Database
        from pawl.server.db.durability import require_durable

        if self._settings.database_url is None:
            raise StartError("PAWL_DATABASE_URL is required")
        database = await self.enter(
            Database(
                self._settings.database_url.get_secret_value(),
                application_name=f"pawl-{self.name}-{self.instance_id}",
                connections_max=self._settings.database_connections_max,
                waited=self.metrics.histogram(
                    "database_wait_seconds", "Waits for a database connection or for a slot to use one."
                ).observe,
            )
        )
        await require_durable(database, unsafe_allowed=self._settings.database_unsafe)
        self.health.add("database", database.ping)
        return database

    async def create_schema(self, database: Database, schema: str, *, append_only: Collection[str] = ()) -> None:
        """Create `schema` unless it exists.

        With PAWL_DATABASE_OWNER_URL, the owner creates the schema, and grants the role of `database` the privileges
        that a service needs. On `append_only` tables, these are only SELECT and INSERT. If the role can change these
        tables, a warning is logged.

        Raises:
            StartError: Another version created the schema, or a role lacks a privilege.
            DependencyUnavailable: The server cannot be reached.
        """
        from pawl.server.db.database import Database
        from pawl.server.db.rights import Rights, changeable, role_of

        owner_url = self._settings.database_owner_url
        if owner_url is not None:
            rights = Rights(role=await role_of(database), append_only=frozenset(append_only))
            owner = Database(
                owner_url.get_secret_value(),
                application_name=f"pawl-{self.name}-{self.instance_id}-owner",
                connections_max=1,
                variable="PAWL_DATABASE_OWNER_URL",
            )
            async with owner:
                await owner.create_schema(schema, rights=rights)
        # Finds the owner's schema, unless that is in another database.
        await database.create_schema(schema)
        if exposed := await changeable(database, schema, append_only):
            _log.warning(
                "database.append_only_unprotected",
                tables=[f"{schema}.{table}" for table in exposed],
                because="the role of PAWL_DATABASE_URL can change them; set PAWL_DATABASE_OWNER_URL to restrict it",
            )

    async def open_tracer(self) -> Tracer | None:
        """Return a tracer if an OTEL_* variable names an endpoint that receives spans. Otherwise, return None.

        Raises:
            StartError: An OTEL_* variable has a value that cannot be used.
        """
        names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if is_off or os.environ.get("OTEL_TRACES_EXPORTER") == "none" or not any(map(os.environ.get, names)):
            return None
        from pawl.server.process.tracing import Tracer

        return await self.enter(Tracer(self.name, self.instance_id, self.metrics))

    async def open_bus(self) -> Bus:
        """Return the bus, whether or not it is connected.

        The service's health reports its state but does not depend on it.
        """
        from pawl.server.bus.connection import Bus

        url = self._settings.nats_url.get_secret_value() if self._settings.nats_url else None
        settings = self._settings
        files = (settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file)
        name = f"pawl-{self.name}-{self.instance_id}"
        bus = await self.enter(Bus(url, name=name, metrics=self.metrics, tls=tls.of_bus(*files)))
        self.health.add("nats", bus.ping, optional=True)
        return bus

    async def open_channel(
        self,
        peer: str,
        addresses: str,
        *,
        message_bytes_max: int = PEER_MESSAGE_BYTES_MAX,
        public: bool = False,
        optional: bool = False,
    ) -> grpc.aio.Channel:
        """Return a channel to another service. Unless `optional` is set, this service's health depends on that service.

        During the first three seconds of this process, this waits until that service answers.

        By default, the channel sends the service key. A `public` channel is for methods that users also call. Each call
        has its own key, and raises the PawlError that the peer reported. With a certificate authority, the channel uses
        TLS, and the peer's certificate must name the service.
        """
        channel = await self.enter(
            open_channel(
                addresses,
                service_key=None if public else service_key(self._settings, self.clock),
                message_bytes_max=message_bytes_max,
                batches=not public,
                tls=self.tls if self._settings.tls_ca_file else None,
                server_name=peer.replace("_", "-"),
                translate=from_rpc_error if public else None,
                relay_key=service_key(self._settings, self.clock) if public else None,
            )
        )
        self.health.add(peer, lambda: ping(channel), optional=optional)
        # Services that start together find each other without failed calls.
        await tasks.within(max(0.0, self._peers_end - time.monotonic()), channel.channel_ready())
        return channel

    def rpc_server(self, keys: KeySource | None = None) -> RpcServer:
        """Return the server that the settings describe. Add servicers to it, then `serve` it.

        Callers can use `keys` in addition to the keys in the settings.
        """
        issuers = read_issuers(self._settings, self.clock)
        if issuers:
            self.background.start("issuers", issuers.run)
        rows = self.key_rows = KeyRows(keys, self.clock) if keys else None
        if rows:
            age = self.metrics.gauge(
                "keys_age_seconds", "Time since API keys were last read; after 60 s, all are refused."
            )
            age.set_function(lambda: rows.age_seconds)
            self.background.start("keys", rows.run)
        return RpcServer(
            self._settings.listen,
            authenticator=authenticator(self._settings, rows=rows, issuers=issuers),
            ids=self.ids,
            metrics=self.metrics,
            limits=Limits(
                message_bytes_max=self._settings.message_bytes_max,
                streams_max=self._settings.streams_max,
                store_share=self._settings.store_share,
                user_share=self._settings.user_share,
                request_stream_bytes_max=self._settings.request_stream_bytes_max,
            ),
            drain_seconds=self._settings.drain_seconds,
            tls=self.tls,
            internal_listen=self._settings.internal_listen,
        )

    async def serve(self, server: RpcServer | HttpServer, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. The `background` loops run until the drain has ended."""
        pages = {
            "/metrics": lambda: Response(body=self.metrics.text(), content_type=CONTENT_TYPE),
            "/healthz": self.health.page,
        }
        self._warn_without_tls()
        async with AsyncExitStack() as stack:
            http = HttpServer(application(pages), self._settings.metrics_listen, tls=self.tls)
            await stack.enter_async_context(http)
            if isinstance(server, RpcServer):
                self.health.follow(server)
            await stack.enter_async_context(server)
            await stack.enter_async_context(self.health)
            internal = {"internal": server.internal_address} if server.internal_address else {}
            self._write_addresses({server.protocol: server.address, "metrics": http.address, **internal})
            # Modules and other objects created at start never become garbage, so collections need not visit them.
            gc.freeze()
            # Most objects of a call are gone by the next collection, and fewer collections cost less.
            gc.set_threshold(_COLLECTED_AFTER)
            await stop.wait()

    def _warn_without_tls(self) -> None:
        listens = (self._settings.listen, self._settings.metrics_listen)
        if self.tls is None and (open_to := [address for address in listens if not is_loopback(address)]):
            _log.warning(
                "tls.absent",
                addresses=open_to,
                detail="keys and contents are sent unencrypted: set PAWL_TLS_CERTIFICATE_FILE and"
                " PAWL_TLS_KEY_FILE, or terminate TLS in a proxy",
            )

    def _write_addresses(self, addresses: dict[str, str]) -> None:
        path = self._settings.address_file
        if path is None:
            return
        # Write atomically for processes that wait for the file.
        part = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            part.write_bytes(msgspec.json.encode(addresses) + b"\n")
            Path.replace(part, path)
        except OSError as error:
            raise StartError(f"PAWL_ADDRESS_FILE: cannot write {path}: {error.strerror}") from None
