"""The gRPC server of a process, with health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Self, TypeAlias, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2_grpc

from pawl.batch.v1.batch_pb2_grpc import add_BatchServiceServicer_to_server
from pawl.chassis.identity.auth import KEY_LENGTH_MAX, Authenticator
from pawl.chassis.identity.roles import AGENT_LOOP, CALLERS
from pawl.chassis.ids import IdSource
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.address import join_address, split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.kinds import Handler
from pawl.chassis.rpc.limits import KEEPALIVE, Limits
from pawl.chassis.rpc.tls import Tls, server_credentials
from pawl.server.process.metrics import Metrics
from pawl.server.rpc import health as rpc_health
from pawl.server.rpc import reflection as rpc_reflection
from pawl.server.rpc.batch_server import BatchServicer
from pawl.server.rpc.interceptor import Access, Interceptor

# Time between the notification of health watchers about the shutdown and the refusal of calls.
_NOTICE_SECONDS: Final = 0.05
# After the drain time, handlers have this long to clean up before they are cancelled.
_CLEAN_UP_SECONDS: Final = 0.5
_LIMITS: Final = Limits()
# How many calls beyond our limits a connection may have while they are being refused.
_REFUSED_MAX: Final = 1000

_log = logs.get_logger(__name__)
ServicerT = TypeVar("ServicerT")
# Answers a call, given the full method name and the raw request.
Forward: TypeAlias = Callable[[str, bytes], Awaitable[bytes]]


class RpcServer:
    """A gRPC server. An async context manager that listens once entered, and drains on exit.

    Add the servicers before entering it. On exit, the health service reports NOT_SERVING, new calls are refused, and
    streams end with SHUTTING_DOWN so that watchers reconnect elsewhere. Running unary calls, and streams added with
    `drain_streams`, get `drain_seconds` to complete.

    With `tls`, both listeners use TLS. If `tls` has a certificate authority, services must present a certificate and
    use `internal_listen`. That address does not accept any other clients, because gRPC cannot request client
    certificates on a port without requiring them.

    Callers are checked again every `callers_seconds`. A user's calls end with UNAUTHENTICATED if the credential has
    expired, was revoked or lost rights.
    """

    protocol = "grpc"

    def __init__(
        self,
        listen: str,
        *,
        authenticator: Authenticator,
        ids: IdSource,
        metrics: Metrics,
        limits: Limits = _LIMITS,
        drain_seconds: float = 1.5,
        tls: Tls | None = None,
        internal_listen: str | None = None,
        callers_seconds: float = 2.0,
    ) -> None:
        self._listen = listen
        self._internal_listen = internal_listen
        self._tls = tls
        self._drain_seconds = drain_seconds
        self._callers_seconds = callers_seconds
        self._watching: asyncio.Task[None] | None = None
        self._callers = dict(CALLERS)
        self._access = {
            rpc_health.NAME: Access(open=True),
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
            certified_services=_is_checking(tls),
        )
        self._server = grpc.aio.server(interceptors=(self._interceptor,), options=_options(limits))
        self._batches = BatchServicer(self._interceptor, bytes_max=limits.message_bytes_max)
        self.health = rpc_health.HealthServicer()
        self.service_names: list[str] = []
        self.address = ""
        self.internal_address = ""

    def add(
        self,
        register: Callable[[ServicerT, grpc.aio.Server], None],
        servicer: ServicerT,
        *,
        service_only: bool = False,
        drain_streams: bool = False,
        callers: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Add a servicer with `register`, its generated `add_XServicer_to_server`.

        `callers` lists the callers of methods that are not in `roles.CALLERS`. With `service_only`, users get
        PERMISSION_DENIED, calls may arrive in batches, and methods must not use the context. With `drain_streams`, the
        servicer's streams get the drain time at shutdown, instead of ending immediately.
        """
        self._callers.update(callers or {})
        access = Access(service_only=service_only, drain_streams=drain_streams)
        for name, methods in self._add(register, servicer, access).items():
            if service_only:
                self._batches.add(name, methods)

    def add_forwarding(
        self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, forward: Forward
    ) -> None:
        """Add a service that has only unary methods. `forward` answers the methods that `servicer` does not have."""
        self._add(register, servicer, Access(), forward)

    def add_forwarded(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object) -> None:
        """Add the methods of `servicer` for calls that agent-loop forwards.

        Only agent-loop may call them. The user named in the metadata counts as the caller (see `auth.for_user`).
        """
        for name, methods in self._add(register, servicer, Access(service_only=True, forwarded=True)).items():
            self._callers.update({f"/{name}/{method}": frozenset({AGENT_LOOP}) for method in methods})

    def _add(
        self,
        register: Callable[[Any, grpc.aio.Server], None],
        servicer: object,
        access: Access,
        forward: Forward | None = None,
    ) -> Mapping[str, Mapping[str, Handler]]:
        registrar = _Registrar(servicer, forward)
        register(registrar, cast("grpc.aio.Server", registrar))
        for name, methods in registrar.services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
            self._access[name] = access
            self.service_names.append(name)
            if not access.service_only:
                self._batches.add_relayed(name, methods)
        return registrar.services

    def set_health(self, *, serving: bool) -> None:
        """Publish the health of all services. If they are unhealthy, ask batch clients to use another replica."""
        self.health.set(dict.fromkeys(("", *self.service_names), serving))
        if not serving:
            self._batches.close_streams()

    async def __aenter__(self) -> Self:
        self.add(add_BatchServiceServicer_to_server, self._batches, service_only=True, drain_streams=True)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        rpc_reflection.add_reflection([*self.service_names, rpc_health.NAME], self._server)
        self.set_health(serving=True)
        self.address = self._bind(self._listen, from_services=False)
        listen = self._internal_listen
        if listen is not None and (_is_checking(self._tls) if self._tls else listen.startswith("unix:")):
            self.internal_address = self._bind(listen, from_services=True)
        await self._server.start()
        self._watching = asyncio.get_running_loop().create_task(self._watch_callers(), name="rpc.callers")
        _log.info("grpc.listening", address=self.address, internal=self.internal_address, tls=self._tls is not None)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            await tasks.end([self._watching])
        self.health.end()
        self._batches.close_streams()
        await asyncio.sleep(min(_NOTICE_SECONDS, self._drain_seconds / 10))
        self._interceptor.stop_calls(drainable=False)
        stop = asyncio.ensure_future(self._server.stop(self._drain_seconds + _CLEAN_UP_SECONDS))
        await asyncio.wait({stop}, timeout=self._drain_seconds)
        self._interceptor.stop_calls(drainable=True)
        await stop
        _log.info("grpc.stopped")

    async def _watch_callers(self) -> None:
        while True:
            await asyncio.sleep(self._callers_seconds)
            try:
                await self._interceptor.end_outdated()
                self._interceptor.failures.report()
            except Exception:  # noqa: BLE001  # retried at the next check
                _log.exception("callers.check_failed")

    def _bind(self, listen: str, *, from_services: bool) -> str:
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, server_credentials(self._tls, from_services=from_services))
        except RuntimeError:
            raise StartError(
                f"cannot listen on {listen}: the port is in use, or this process may not open it"
            ) from None
        return listen if listen.startswith("unix:") else join_address(split_address(listen)[0], port)


def _is_checking(tls: Tls | None) -> bool:
    return tls is not None and tls().authority is not None


class _Registrar:
    """A stand-in for the server and the servicer during registration.

    It collects the served and the forwarded methods.
    """

    def __init__(self, servicer: object, forward: Forward | None) -> None:
        self._servicer = servicer
        self._forward = forward
        self.services: dict[str, dict[str, Handler]] = {}

    def __getattr__(self, method: str) -> Any:
        return getattr(self._servicer, method, None)

    def add_generic_rpc_handlers(self, _: Iterable[grpc.GenericRpcHandler]) -> None:
        """Do nothing, because these handlers include methods that the servicer lacks."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Handler]) -> None:
        # The handler of a method that the servicer lacks wraps None.
        served = {
            name: handler
            for name, handler in method_handlers.items()
            if handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        }
        if self._forward is not None:
            for name in method_handlers.keys() - served.keys():
                served[name] = _forwarding(f"/{service_name}/{name}", self._forward)
        self.services[service_name] = served


def _forwarding(name: str, forward: Forward) -> Handler:
    async def answer(request: bytes, _: object) -> bytes:
        return await forward(name, request)

    return grpc.unary_unary_rpc_method_handler(answer)


def _options(limits: Limits) -> list[tuple[str, Any]]:
    calls_max = limits.unary_calls_max + limits.streams_max + _REFUSED_MAX
    return [
        ("grpc.max_receive_message_length", limits.read_bytes_max),
        # gRPC keeps a call until its client has read everything, which may never happen. Calls over our limits are
        # refused and end quickly, so this bound is enough.
        ("grpc.max_concurrent_streams", calls_max),
        # Otherwise, gRPC cancels some of a thousand calls that start concurrently, without a reason.
        ("grpc.server.max_pending_requests", calls_max),
        ("grpc.server.max_pending_requests_hard_limit", calls_max),
        ("grpc.max_send_message_length", -1),
        # Above the soft limit, gRPC refuses calls at random, so the limit is twice the longest credential.
        ("grpc.max_metadata_size", 2 * KEY_LENGTH_MAX),
        ("grpc.absolute_max_metadata_size", 4 * KEY_LENGTH_MAX),
        # Otherwise gRPC would buffer whole requests from fast clients before they are read.
        ("grpc.http2.bdp_probe", 0),
        # Two processes on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        *KEEPALIVE,
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 3),
    ]
