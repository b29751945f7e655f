"""The gRPC server of a process, with health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self, TypeVar, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pawl.batch.v1.batch_pb2_grpc import add_BatchServiceServicer_to_server
from pawl.chassis import logs, rpc_reflection
from pawl.chassis.auth import KEY_LENGTH_MAX, Authenticator
from pawl.chassis.ids import IdSource
from pawl.chassis.metrics import Metrics
from pawl.chassis.roles import CALLERS
from pawl.chassis.rpc_batch_server import BatchServicer
from pawl.chassis.rpc_interceptor import Access, Interceptor
from pawl.chassis.rpc_kinds import Handler
from pawl.chassis.rpc_limits import Limits
from pawl.chassis.settings import split_address
from pawl.chassis.start import StartError

# Between the news that this server ends, for those who watch its health, and the end.
_NEWS_SECONDS: Final = 0.05
# After the drain time, handlers have this long to clean up before they are cut off.
_CLEAN_UP_SECONDS: Final = 0.5
_LIMITS: Final = Limits()

_log = logs.get_logger(__name__)
ServicerT = TypeVar("ServicerT")


class RpcServer:
    """An async context manager: listens inside it, drains and stops at its end.

    Add the servicers first. At the end: health says NOT_SERVING, nothing new is
    accepted, streams end with SHUTTING_DOWN (watchers attach again elsewhere),
    running unary calls and streams added with `drain_streams` get
    `drain_seconds` to end, then they are ended too.
    """

    def __init__(
        self,
        listen: str,
        *,
        authenticator: Authenticator,
        ids: IdSource,
        metrics: Metrics,
        limits: Limits = _LIMITS,
        drain_seconds: float = 1.5,
    ) -> None:
        self._listen = listen
        self._drain_seconds = drain_seconds
        self._callers = dict(CALLERS)
        self._access = {
            health.SERVICE_NAME: Access(open=True),
            rpc_reflection.OLD_NAME: Access(),
            rpc_reflection.NAME: Access(),
        }
        self._interceptor = Interceptor(
            authenticator=authenticator,
            ids=ids,
            metrics=metrics.rpc,
            limits=limits,
            access=self._access,
            callers=self._callers,
        )
        self._server = grpc.aio.server(interceptors=(self._interceptor,), options=_options(limits.read_bytes_max))
        self._batches = BatchServicer(self._interceptor, bytes_max=limits.message_bytes_max)
        self.health = health.aio.HealthServicer()
        self.service_names: list[str] = []
        self.port = 0
        self.address = ""

    def add(
        self,
        register: Callable[[ServicerT, grpc.aio.Server], None],
        servicer: ServicerT,
        *,
        service_only: bool = False,
        drain_streams: bool = False,
        callers: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Add a servicer by its generated `add_XServicer_to_server`.

        `callers` says who may call those of its methods that are not in `roles.CALLERS`.
        `service_only`: users get PERMISSION_DENIED, and calls may come in batches; its
        methods do without a context. `drain_streams`: at shutdown its streams get the
        drain time, instead of ending at once.
        """
        self._callers.update(callers or {})
        registrar = _Registrar(self._server)
        register(servicer, cast("grpc.aio.Server", registrar))
        for name, methods in registrar.services.items():
            self._access[name] = Access(service_only=service_only, drain_streams=drain_streams)
            self.service_names.append(name)
            if service_only:
                self._batches.add(name, methods)

    async def set_health(self, *, serving: bool) -> None:
        """Say to everybody whether the services are well; if not, batches are to go elsewhere."""
        state: Any = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self.service_names):
            await self.health.set(name, state)
        if not serving:
            self._batches.close_streams()

    async def __aenter__(self) -> Self:
        self.add(add_BatchServiceServicer_to_server, self._batches, service_only=True, drain_streams=True)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        rpc_reflection.add_reflection([*self.service_names, health.SERVICE_NAME], self._server)
        await self.set_health(serving=True)
        try:
            self.port = self._server.add_insecure_port(self._listen)
        except RuntimeError:
            raise StartError(
                f"cannot listen on {self._listen}: the port is in use, or this process may not open it"
            ) from None
        await self._server.start()
        self.address = self._bound_address()
        _log.info("grpc.listening", address=self.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.health.enter_graceful_shutdown()
        self._batches.close_streams()
        await asyncio.sleep(min(_NEWS_SECONDS, self._drain_seconds / 10))
        self._interceptor.stop_calls(drainable=False)
        stop = asyncio.ensure_future(self._server.stop(self._drain_seconds + _CLEAN_UP_SECONDS))
        await asyncio.wait({stop}, timeout=self._drain_seconds)
        self._interceptor.stop_calls(drainable=True)
        await stop
        _log.info("grpc.stopped")

    def _bound_address(self) -> str:
        if self._listen.startswith("unix:"):
            return self._listen
        host, _ = split_address(self._listen)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class _Registrar:
    """Stands in for the server while a servicer is added, to learn its services and their methods."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.services: dict[str, dict[str, Handler]] = {}

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = tuple(handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler):
                self.services.setdefault(handler.service_name(), {})
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        self.services.setdefault(service_name, {}).update(method_handlers)
        self._server.add_registered_method_handlers(service_name, dict(method_handlers))


def _options(read_bytes_max: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", read_bytes_max),
        ("grpc.max_send_message_length", -1),
        # Beyond the first, gRPC refuses calls by chance. The longest credential has half of it.
        ("grpc.max_metadata_size", 2 * KEY_LENGTH_MAX),
        ("grpc.absolute_max_metadata_size", 4 * KEY_LENGTH_MAX),
        # Else gRPC would take in whole requests that nobody has asked for yet, from clients that send fast.
        ("grpc.http2.bdp_probe", 0),
        # Two processes on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 3),
    ]
