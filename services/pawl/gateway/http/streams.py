"""Streams of server-sent events: several of gRPC in one, because browsers open six connections to a host.

A message that waits to be sent holds up the streams that it came from, so a slow reader costs its own messages and no
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pawl.chassis import logs, tasks
from pawl.chassis.ids import is_id
from pawl.errors import Internal, InvalidField, InvalidId, Overloaded, PawlError, ShuttingDown
from pawl.gateway.adapters.metrics import Counters
from pawl.gateway.adapters.services import WATCH_RUN, Metadata, Method, Services, find, write
from pawl.gateway.http.answers import read_json, told
from pawl.gateway.http.callers import Callers

WATCHED_MAX: Final = 16
"""Most streams of gRPC in one stream of a browser."""
STREAM_SECONDS_MAX: Final = 3600.0
"""The age at which a stream ends, for whoever reads it to come back with a credential that still counts."""
HEARTBEAT_SECONDS: Final = 15.0
_WAITING_MAX: Final = 4
_BYTES_MAX: Final = 64 * 1024

_log = logs.get_logger(__name__)


class _Subscription(msgspec.Struct, forbid_unknown_fields=True):
    method: str
    request: dict[str, Any] = {}


class _Wishes(msgspec.Struct, forbid_unknown_fields=True):
    subscriptions: dict[str, _Subscription]


class _Event(msgspec.Struct):
    data: Any
    id: str = ""
    name: str = ""


class Streams:
    """Opens streams, and ends them with the process."""

    def __init__(
        self, callers: Callers, services: Services, counters: Counters, closing: asyncio.Event, *, streams_max: int
    ) -> None:
        self._callers = callers
        self._services = services
        self._counters = counters
        self._closing = closing
        self._streams_max = streams_max
        self._open = 0

    async def many(self, request: Request) -> Response:
        """Answer `POST /stream` with the messages of all subscriptions, each with its key."""
        metadata = self._callers.credential(request)
        try:
            wishes = msgspec.convert(await read_json(request, _BYTES_MAX), _Wishes).subscriptions
        except msgspec.ValidationError as error:
            raise InvalidField(f"These are no subscriptions: {error}", field="subscriptions") from None
        if not 1 <= len(wishes) <= WATCHED_MAX:
            raise InvalidField(f"Subscribe to 1 to {WATCHED_MAX} streams.", field="subscriptions")
        found = {key: find(wish.method, streams=True) for key, wish in wishes.items()}
        asked = {key: (found[key], found[key].read(wish.request)) for key, wish in wishes.items()}
        return self._respond(_each(asked, self._services, metadata))

    async def run(self, request: Request) -> Response:
        """Answer `GET /runs/{run_id}/events` with the events of a run, from the one after `Last-Event-ID`."""
        metadata = self._callers.credential(request)
        run_id = request.path_params["run_id"]
        if not is_id(run_id):
            raise InvalidId("The id of a run has letters, digits, _ and - only, and at most 64.", field="run_id")
        after = request.headers.get("last-event-id") or request.query_params.get("after_seq") or "0"
        if not (after.isascii() and after.isdecimal() and len(after) <= len(str(2**63))):
            raise InvalidField("Last-Event-ID must be the seq of an event.", field="last-event-id")
        method = find(WATCH_RUN, streams=True)
        watched = method.read({"runId": run_id, "afterSeq": after})
        return self._respond(_events(self._services.watch(method.name, watched, metadata)))

    def _respond(self, events: AsyncIterator[_Event]) -> Response:
        if self._closing.is_set():
            raise ShuttingDown
        if self._open >= self._streams_max:
            raise Overloaded("Too many streams are open: close some, or try again.")
        return _EventStream(self, events)

    async def serve(self, events: AsyncIterator[_Event], send: Send) -> None:
        """Send events until there are no more, the stream is old, or the process ends."""
        self._open += 1
        self._counters.streams.inc()
        try:
            async with asyncio.timeout(STREAM_SECONDS_MAX):
                await self._send_all(events, send)
        except TimeoutError:
            return
        finally:
            self._open -= 1
            self._counters.streams.dec()

    async def _send_all(self, events: AsyncIterator[_Event], send: Send) -> None:
        closing = asyncio.ensure_future(self._closing.wait())
        waiting = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                await asyncio.wait({closing, waiting}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if closing.done():
                    return
                if not waiting.done():
                    await _send(send, b":\n\n")
                    continue
                event = waiting.result()
                if event is None:
                    return
                await _send(send, _line(event))
                self._counters.events.inc()
                waiting = asyncio.ensure_future(anext(events, None))
        finally:
            await tasks.end([closing, waiting])
            await events.aclose()  # type: ignore[attr-defined]  # they are generators


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(self, streams: Streams, events: AsyncIterator[_Event]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._streams = streams
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        sending = asyncio.ensure_future(self._streams.serve(self._events, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await tasks.end([sending, leaving])


async def _each(
    asked: Mapping[str, tuple[Method, Any]], services: Services, metadata: Metadata
) -> AsyncIterator[_Event]:
    """Yield the messages of all streams as they come, then how each ended."""
    queue: asyncio.Queue[_Event] = asyncio.Queue(_WAITING_MAX)

    async def read(key: str, method: Method, request: Any) -> None:
        try:
            async for message in services.watch(method.name, request, metadata):
                await queue.put(_Event(data={"key": key, "message": write(message)}))
            end: dict[str, Any] = {}
        except PawlError as error:
            end = {"error": told(error)}
        except Exception:  # noqa: BLE001  # the others go on
            _log.exception("stream.failed", method=method.name)
            end = {"error": told(Internal())}
        await queue.put(_Event(name="end", data={"key": key, **end}))

    reading: set[asyncio.Task[None]] = set()
    for key, (method, request) in asked.items():
        tasks.start(reading, read(key, method, request), name=f"stream.{method.name}")
    left = len(asked)
    try:
        while left:
            event = await queue.get()
            left -= event.name == "end"
            yield event
    finally:
        await tasks.end(reading)


async def _events(responses: AsyncIterator[Any]) -> AsyncIterator[_Event]:
    """Yield the events of a run, each with its seq as its id, then how the stream ended."""
    try:
        async for response in responses:
            if response.HasField("gap"):
                yield _Event(name="gap", data=write(response.gap))
            for event in response.events:
                yield _Event(id=str(event.seq), data=write(event))
        yield _Event(name="end", data={})
    except PawlError as error:
        yield _Event(name="end", data={"error": told(error)})


def _line(event: _Event) -> bytes:
    head = (f"id: {event.id}\n" if event.id else "") + (f"event: {event.name}\n" if event.name else "")
    return head.encode() + b"data: " + msgspec.json.encode(event.data) + b"\n\n"


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
