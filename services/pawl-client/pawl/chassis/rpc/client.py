"""Channels to other services. They raise the services' errors as PawlErrors."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Self, TypeVar

import grpc
import msgspec

from pawl.batch.v1 import batch_pb2
from pawl.batch.v1.batch_pb2_grpc import BatchServiceStub
from pawl.chassis.identity.auth import named_user
from pawl.chassis.process import tasks
from pawl.chassis.process.address import split_address
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.batch_client import (
    RELAY_SECONDS,
    REQUEST_BYTES_MAX,
    STREAM_SECONDS,
    Batches,
    Identity,
    Line,
    Responses,
    only_response,
)
from pawl.chassis.rpc.limits import KEEPALIVE
from pawl.chassis.rpc.renewal import RenewedChannel
from pawl.chassis.rpc.replicas import key_of
from pawl.chassis.rpc.request_id import REQUEST_ID_KEY, current_request_id
from pawl.chassis.rpc.status import from_rpc_error, of_peer
from pawl.chassis.rpc.tls import Tls, channel_credentials
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY, current_traceparent

T = TypeVar("T")
# Converts a gRPC error to another exception.
Translate = Callable[[grpc.aio.AioRpcError], Exception]

DEFAULT_DEADLINE_SECONDS: Final = 10.0
_SILENT_SECONDS: Final = 1.0
_SENT_MAX: Final = 4
PEER_MESSAGE_BYTES_MAX: Final = 8 * 1024 * 1024
# Overhead of a batch around a response, with some margin.
_ENVELOPE_BYTES: Final = 1024

# A name may resolve to several replicas, and gRPC gives each stream to the next one.
_STREAMS_OF_A_NAME: Final = 4

# Only the caller knows which calls are safe to repeat, so it does the retries. One layer of retries is enough. gRPC
# still retries calls that were never sent. Replicas that report NOT_SERVING get no calls.
_SERVICE_CONFIG: Final = msgspec.json.encode(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}}
).decode()


def open_channel(
    addresses: str,
    *,
    service_key: str | Callable[[], str] | None = None,
    metadata: Callable[[], Sequence[tuple[str, str]]] = tuple,
    message_bytes_max: int = PEER_MESSAGE_BYTES_MAX,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    batches: bool = False,
    tls: Tls | None = None,
    server_name: str | None = None,
    translate: Translate | None = None,
    relay_key: Callable[[], str] | None = None,
) -> grpc.aio.Channel:
    """Return a channel to one service. It connects when the first call is made.

    `addresses` is one `host:port`, whose name may resolve to several replicas, or a comma-separated list of `ip:port`.
    Calls are spread over all replicas that are reachable and healthy. Lost replicas are retried within 2 s.

    Each call sends `service_key` (or its current value), the current `metadata`, and the id of the request being
    served. Calls with a unary response end after `deadline_seconds`, unless they have their own `timeout`. Response
    streams have no default deadline. gRPC retries only calls that were never sent.

    With `batches`, calls with one request are sent in batches where possible, which is cheaper. With several addresses,
    each store prefers one of them (see `replicas`). Behind one name, calls are spread over up to four replicas. The
    server must be a Pawl service. A call raises the PawlError that the server reported.

    With `translate`, a failed call raises the result of `translate`, and a call with a unary response is a plain
    coroutine. If there are several replicas and one is silent for a second, the next replica gets the call. This
    applies to calls that are safe to repeat, and to new response streams that only read.

    With `relay_key`, which is the key of a service, all response streams share a few gRPC streams. This needs half the
    memory. Each response stream still has its own credential in its metadata, and fails independently of the others.

    With `tls`, the channel uses certificates and follows changes to them. The server's certificate must name
    `server_name`, or the host of a single address.

    Close the channel, or use it as an async context manager.

    Raises:
        StartError: The addresses cannot be combined.
    """
    reached = partial(connect, tls=tls, server_name=server_name, options=_options(message_bytes_max))
    channel = reached(_target(addresses))
    replicas = _parts(addresses) if batches else []
    return _Channel(
        channel,
        service_key=service_key,
        metadata=metadata,
        deadline_seconds=deadline_seconds,
        replicas={one: reached(_target(one)) if len(replicas) > 1 else channel for one in replicas},
        response_bytes_max=message_bytes_max,
        translate=translate,
        relay=None if relay_key is None else (relay_key, _line(addresses, channel, RELAY_SECONDS)),
        has_replicas=len(_parts(addresses)) > 1
        # A name may resolve to several addresses.
        or not (addresses.startswith(("unix:", "localhost:")) or _ip_version(addresses)),
    )


def connect(
    target: str, tls: Tls | None, *, server_name: str | None = None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.aio.Channel:
    options = options or _options(PEER_MESSAGE_BYTES_MAX)
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    named = [*options, *([("grpc.ssl_target_name_override", server_name)] if server_name else [])]
    return RenewedChannel(tls, lambda shown: grpc.aio.secure_channel(target, channel_credentials(shown), options=named))


async def translated(call: Awaitable[T]) -> T:
    """Return the response of a call. Raises the same errors as `translating`."""
    with translating():
        return await call


@contextmanager
def translating() -> Iterator[None]:
    """Wrap a call or the reading of a stream, and raise the PawlError that the peer reported.

    An unreachable peer or a missed deadline becomes DependencyUnavailable. Cancellation passes through.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise of_peer(from_rpc_error(error)) from error


class _Channel(grpc.aio.Channel):
    """A channel that adds metadata and a deadline to calls.

    Interceptors would cost more than the call: grpc.aio runs each intercepted call in its own task.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        service_key: str | Callable[[], str] | None,
        metadata: Callable[[], Sequence[tuple[str, str]]],
        deadline_seconds: float,
        replicas: Mapping[str, grpc.aio.Channel],
        response_bytes_max: int,
        translate: Translate | None,
        relay: tuple[Callable[[], str], Line] | None,
        has_replicas: bool,
    ) -> None:
        self._channel = channel
        self._translate = translate
        self._has_replicas = has_replicas
        self._replicas = replicas
        self._asked_metadata = metadata
        self._deadline_seconds = deadline_seconds
        self._service_key = service_key
        self._batches: Batches | None = None
        if replicas:
            self._batches = Batches(
                [_line(address, one) for address, one in replicas.items()],
                identity=self._identity,
                response_bytes_max=response_bytes_max - _ENVELOPE_BYTES,
            )
        self._relays: Batches | None = None
        if relay is not None:
            key, line = relay
            self._relays = Batches(
                [line],
                identity=lambda: (("authorization", f"Bearer {key()}"),),
                response_bytes_max=response_bytes_max - _ENVELOPE_BYTES,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for batches in (self._batches, self._relays):
            if batches is not None:
                await batches.close()
        await asyncio.gather(*(channel.close(grace) for channel in {self._channel, *self._replicas.values()}))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        def single(channel: grpc.aio.Channel) -> Any:
            return self._answering(self._calling(channel.unary_unary(*args, **kwargs), self._deadline_seconds))

        if self._translate is not None and self._has_replicas:
            return partial(_first_answer, single(self._channel), args[0])
        return self._batching(single, self._deadline_seconds, *args, **kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        if self._relays is not None:
            return _relaying(self._relays, *args, **kwargs)

        def single(channel: grpc.aio.Channel) -> Any:
            return self._streaming(channel.unary_stream(*args, **kwargs), only_reads=True)

        return self._batching(single, None, *args, **kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._answering(self._calling(self._channel.stream_unary(*args, **kwargs), self._deadline_seconds))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._streaming(self._channel.stream_stream(*args, **kwargs))

    def _identity(self) -> Identity:
        key = self._service_key() if callable(self._service_key) else self._service_key
        return (("authorization", f"Bearer {key}"),) if key else ()

    def _calling(self, method: Any, deadline_seconds: float | None) -> Any:
        def call(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Sequence[tuple[str, str | bytes]] | None = None,
            **kwargs: Any,
        ) -> Any:
            return method(
                request,
                timeout=deadline_seconds if timeout is None else timeout,
                metadata=(*self._identity(), *self._asked_metadata(), *_of_request(), *(metadata or ())),
                **kwargs,
            )

        return call

    def _answering(self, method: Any) -> Any:
        translate = self._translate
        if translate is None:
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            except grpc.aio.AioRpcError as error:
                raise translate(error) from None  # The message has the details.

        return call

    def _batching(
        self,
        single: Callable[[grpc.aio.Channel], Any],
        deadline_seconds: float | None,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: Any = None,
    ) -> Any:
        """Return a callable that sends a method's calls in batches.

        Large calls, and calls with options other than a timeout, are made with `single`. They go to the same replica as
        their batch would.
        """
        batches = self._batches
        if batches is None or method.startswith("/grpc."):
            return single(self._channel)
        to_each = {address: single(channel) for address, channel in self._replicas.items()}

        def call(request: Any, *, timeout: float | None = None, **special: Any) -> Any:
            raw = request_serializer(request) if request_serializer else request
            user = named_user(special.get("metadata") or ())
            key = user.store_id if user else key_of(request)
            if special or len(raw) > REQUEST_BYTES_MAX:
                return to_each[batches.line(key).name](request, timeout=timeout, **special)
            seconds = deadline_seconds if timeout is None else timeout
            fields = {"timeout_seconds": seconds or 0.0, "request_id": current_request_id()}
            start = partial(batches.start, method, raw, key=key, **fields)
            if deadline_seconds is None:
                return Responses(start, response_deserializer)
            return only_response(start, response_deserializer)

        return call

    def _streaming(self, method: Any, *, only_reads: bool = False) -> Any:
        open_call = self._calling(method, None)
        may_restart = only_reads and self._translate is not None and self._has_replicas

        def call(*args: Any, **kwargs: Any) -> Any:
            start = partial(open_call, *args, **kwargs)
            return _StreamCall(start(), self._translate, start if may_restart else None)

        return call


class _StreamCall:
    """Wraps a call with a response stream. Delegates everything except reading to the call.

    Cancelling a read also cancels the RPC. grpc.aio itself does not do this if the request has just been sent, and the
    server would continue without a client.

    With `start`, a call is started again if the server does not accept it within a second. gRPC then sends it to the
    next replica.
    """

    def __init__(self, call: Any, translate: Translate | None, start: Callable[[], Any] | None) -> None:
        self._call = call
        self._translate = translate
        self._start = start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        # gRPC's iterator would keep each response until the next one.
        if (response := await self.read()) is grpc.aio.EOF:
            raise StopAsyncIteration
        return response

    async def read(self) -> Any:
        if self._start is not None:
            start, self._start = self._start, None
            await self._reading(self._opened(start))
        return await self._reading(self._call.read())

    async def _opened(self, start: Callable[[], Any]) -> None:
        for _ in range(_SENT_MAX - 1):
            # Servers send the initial metadata before the first response.
            if await tasks.within(_SILENT_SECONDS, self._call.initial_metadata()) is not None:
                return
            self._call.cancel()
            self._call = start()

    async def _reading(self, response: Awaitable[Any]) -> Any:
        try:
            return await response
        except asyncio.CancelledError:
            self._call.cancel()
            raise
        except grpc.aio.AioRpcError as error:
            if self._translate is None:
                raise
            raise self._translate(error) from None


async def _first_answer(method: Any, name: str, request: Any, **special: Any) -> Any:
    """Call a method and return the first response.

    If repeating is safe, resend the request after each second of silence. Repeating is safe for requests that only read
    or have an id, unless they are long polls. gRPC sends each copy to the next replica.
    """
    only_reads = name.rpartition("/")[2].startswith(("Get", "List", "WhoAmI"))
    has_id, is_long_poll = (bool(getattr(request, field, None)) for field in ("request_id", "wait_seconds"))
    if is_long_poll or not (only_reads or has_id):
        return await method(request, **special)
    asked: list[asyncio.Task[Any]] = []
    try:
        while True:
            asked.append(asyncio.ensure_future(method(request, **special)))
            seconds = _SILENT_SECONDS if len(asked) < _SENT_MAX else None
            done, _ = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done.pop().result()
    finally:
        await tasks.end(asked)


def _of_request() -> list[tuple[str, str]]:
    """Return metadata that links a call to the request being served."""
    values = ((REQUEST_ID_KEY, current_request_id()), (TRACEPARENT_KEY, current_traceparent()))
    return [(key, value) for key, value in values if value]


def _relaying(
    relays: Batches, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
) -> Callable[..., Responses]:
    def call(request: Any, *, metadata: Sequence[tuple[str, str]]) -> Responses:
        sent = [batch_pb2.Metadata(key=name, value=value) for name, value in (*metadata, *_of_request())]
        return Responses(
            partial(relays.start, method, request_serializer(request), metadata=sent), response_deserializer
        )

    return call


def _line(address: str, channel: grpc.aio.Channel, stream_seconds: float = STREAM_SECONDS) -> Line:
    # Bypasses the wrappers above, because a batch stream does not belong to any request.
    open_stream: Any = BatchServiceStub(channel).Batch
    return Line(
        address,
        lambda identity: open_stream(metadata=identity),
        partial(channel.get_state, try_to_connect=True),
        streams_max=1 if address.startswith("unix:") or _ip_version(address) else _STREAMS_OF_A_NAME,
        stream_seconds=stream_seconds,
    )


def _parts(addresses: str) -> list[str]:
    parts = [address.strip() for address in addresses.split(",")]
    return parts if len(parts) == 1 else [part.replace("localhost:", "127.0.0.1:") for part in parts]


def _target(addresses: str) -> str:
    parts = _parts(addresses)
    if len(parts) == 1:
        return parts[0] if parts[0].startswith("unix:") else f"dns:///{parts[0]}"
    if all(part.startswith("unix:") for part in parts):
        return "unix:" + ",".join(part.removeprefix("unix:") for part in parts)
    versions = set(map(_ip_version, parts))
    if versions not in ({4}, {6}):
        raise StartError(
            f"{addresses}: multiple addresses must be IP addresses of the same version;"
            " or use one name that resolves to all replicas"
        )
    return f"ipv{versions.pop()}:{','.join(parts)}"


def _ip_version(address: str) -> int:
    try:
        return ipaddress.ip_address(split_address(address)[0]).version
    except ValueError:
        return 0


def _options(message_bytes_max: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.max_send_message_length", message_bytes_max),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also the timeout of a connection attempt. A port without a listener is not retried later because of it.
        ("grpc.min_reconnect_backoff_ms", 1_500),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1_000),
        *KEEPALIVE,
        # Channels of one process to the same address share nothing, so closing one does not affect others.
        ("grpc.use_local_subchannel_pool", 1),
    ]
