"""Server-sent event streams.

Each event stream carries several gRPC streams, because browsers open only six connections per host. A pending message
blocks only its own gRPC stream, so a slow reader uses no additional memory. References to sent messages are dropped
immediately, because a thousand tabs may wait for hours for their next message.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pawl.chassis.ids import is_id
from pawl.chassis.process import logs, tasks
from pawl.errors import (
    Internal,
    InvalidField,
    InvalidId,
    NotFound,
    Overloaded,
    PawlError,
    PermissionDenied,
    ShuttingDown,
    Unauthenticated,
)
from pawl.gateway.login.callers import Callers
from pawl.gateway.metrics import Counters
from pawl.gateway.services import GET_RUN, WATCH_RUN, Method, Services, find, write
from pawl.gateway.web.answers import error_json, read_json

# gRPC streams per browser stream.
WATCHED_MAX: Final = 16
# Maximum age of a stream. Then it ends, so that the client reconnects and its credential is checked again.
STREAM_SECONDS_MAX: Final = 3600.0
# For sources without their own heartbeats. Services send theirs more often, and proxies allow 60 s of silence.
HEARTBEAT_SECONDS: Final = 35.0
_BYTES_MAX: Final = 64 * 1024
_LOOKUP_SECONDS: Final = 15.0

_log = logs.get_logger(__name__)


class _Subscription(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    request: dict[str, Any] = {}


class _Subscriptions(msgspec.Struct, forbid_unknown_fields=True):
    subscriptions: dict[str, _Subscription]


class Event(msgspec.Struct):
    data: Any
    id: str = ""
    name: str = ""


Sources: TypeAlias = Sequence[AsyncGenerator[Event, None]]


class Streams:
    """Opens streams, and closes them on shutdown."""

    def __init__(
        self, callers: Callers, services: Services, counters: Counters, closing: asyncio.Event, *, streams_max: int
    ) -> None:
        self._callers = callers
        self._services = services
        self._counters = counters
        self._closing = closing
        self._streams_max = streams_max
        self._open: set[asyncio.Timeout] = set()
        self._ending: asyncio.Task[None] | None = None

    async def many(self, request: Request) -> Response:
        """Handle `POST /stream`: stream the messages of all subscriptions.

        Each message includes its subscription's key.
        """
        metadata = self._callers.credential(request)
        try:
            subscriptions = msgspec.convert(await read_json(request, _BYTES_MAX), _Subscriptions).subscriptions
        except msgspec.ValidationError as error:
            raise InvalidField(f"The subscriptions are invalid: {error}", field="subscriptions") from None
        if not 1 <= len(subscriptions) <= WATCHED_MAX:
            raise InvalidField(f"Subscribe to between 1 and {WATCHED_MAX} streams.", field="subscriptions")
        found = {key: find(subscription.method, streams=True) for key, subscription in subscriptions.items()}
        asked = {
            key: (found[key], found[key].read(subscription.request)) for key, subscription in subscriptions.items()
        }
        return self.respond(
            *(
                _messages(key, method, self._services.watch(method.name, message, metadata))
                for key, (method, message) in asked.items()
            )
        )

    async def run(self, request: Request) -> Response:
        """Handle `GET /runs/{run_id}/events`: stream a run's events after `Last-Event-ID`.

        A missing run is reported as an error before the stream starts. Otherwise, `EventSource` would retry forever.
        """
        metadata = self._callers.credential(request)
        run_id = request.path_params["run_id"]
        if not is_id(run_id):
            raise InvalidId("run_id must have 1 to 64 letters, digits, _ or -.", field="run_id")
        after = request.headers.get("last-event-id") or request.query_params.get("after_seq") or "0"
        if not (after.isascii() and after.isdecimal() and len(after) <= len(str(2**63))):
            raise InvalidField("Last-Event-ID or after_seq must be the seq of an event.", field="after_seq")
        get, method = find(GET_RUN, streams=False), find(WATCH_RUN, streams=True)
        try:
            asked = get.read({"runId": run_id})
            await self._services.call(get.name, asked, metadata, timeout_seconds=_LOOKUP_SECONDS)
        except (NotFound, PermissionDenied, Unauthenticated):
            raise
        except PawlError:
            pass  # Temporary. The client retries if the stream starts.
        watched = method.read({"runId": run_id, "afterSeq": after})
        return self.respond(_events(self._services.watch(method.name, watched, metadata)))

    def respond(
        self, *sources: AsyncGenerator[Event, None], on_leave: Callable[[], Awaitable[object]] | None = None
    ) -> Response:
        """Return a response that streams all sources. If the client disconnects early, `on_leave` is called.

        Raises:
            ShuttingDown, Overloaded: A stream cannot currently be opened.
        """
        if self._closing.is_set():
            raise ShuttingDown
        if len(self._open) >= self._streams_max:
            raise Overloaded("Too many open streams. Close some, or try again later.")
        return _EventStream(self, sources, on_leave)

    async def serve(self, sources: Sources, send: Send, leaving: asyncio.Task[Any]) -> bool:
        """Send events until all sources end, the stream reaches its maximum age, or the process shuts down.

        Return False if the client disconnects first.
        """
        if self._ending is None:
            # One task for all streams, outside of any stream's context.
            self._ending = asyncio.get_running_loop().create_task(self._end_all(), context=contextvars.Context())
        scope = asyncio.timeout(0 if self._closing.is_set() else STREAM_SECONDS_MAX)
        self._counters.streams.inc()
        try:
            async with scope:
                self._open.add(scope)
                return await self._send_all(sources, send, leaving)
        except TimeoutError:
            return True
        finally:
            self._open.discard(scope)
            self._counters.streams.dec()

    async def _end_all(self) -> None:
        await self._closing.wait()
        for scope in self._open:
            if not scope.expired():
                scope.reschedule(0)

    async def _send_all(self, sources: Sources, send: Send, leaving: asyncio.Task[Any]) -> bool:
        waiting: dict[asyncio.Task[Any], AsyncGenerator[Event, None]] = {_next(source): source for source in sources}
        try:
            while waiting:
                done, _ = await asyncio.wait(
                    {leaving, *waiting}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving.done():
                    return False
                if not done:
                    await _send(send, b":\n\n")
                while done:
                    event, source = (task := done.pop()).result(), waiting.pop(task)
                    del task
                    if event is not None:
                        await _send(send, _encoded(event))
                        del event
                        self._counters.events.inc()
                        waiting[_next(source)] = source
            return True
        finally:
            await tasks.end(waiting)
            for source in sources:
                await source.aclose()


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, streams: Streams, sources: Sources, on_leave: Callable[[], Awaitable[object]] | None) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streams = streams
        self._sources = sources
        self._on_leave = on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            if await self._streams.serve(self._sources, send, leaving):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif self._on_leave is not None:
                await self._on_leave()
        finally:
            await tasks.end([leaving])


async def _messages(key: str, method: Method, responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Event, None]:
    end: dict[str, Any] = {}
    try:
        async with contextlib.aclosing(responses):
            async for message in responses:
                yield Event(data={"key": key, "message": write(message)})
                del message
    except PawlError as error:
        end = {"error": error_json(error)}
    except Exception:  # noqa: BLE001  # the other streams continue
        _log.exception("stream.failed", method=method.name)
        end = {"error": error_json(Internal())}
    yield Event(name="end", data={"key": key, **end})


async def _events(responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Event, None]:
    try:
        async with contextlib.aclosing(responses):
            async for response in responses:
                if response.HasField("gap"):
                    yield Event(name="gap", data=write(response.gap))
                for event in response.events:
                    yield Event(id=str(event.seq), data=write(event))
                    del event
                del response
        yield Event(name="end", data={})
    except PawlError as error:
        yield Event(name="end", data={"error": error_json(error)})


def _encoded(event: Event) -> bytes:
    head = (f"id: {event.id}\n" if event.id else "") + (f"event: {event.name}\n" if event.name else "")
    return head.encode() + b"data: " + msgspec.json.encode(event.data) + b"\n\n"


def _next(source: AsyncGenerator[Event, None]) -> asyncio.Task[Any]:
    return asyncio.ensure_future(anext(source, None))


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
