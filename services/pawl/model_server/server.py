"""The model server: HTTP routes, records of requests, and scripted faults."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections import deque
from typing import Any, Self

import msgspec

from pawl.chassis.process import logs
from pawl.model_server.http import ClientGoneError, Connection, Request
from pawl.model_server.intents import SELF
from pawl.model_server.request import ChatRequest, RefusedRequest, read_request
from pawl.model_server.rules import reply_for
from pawl.model_server.script import Fault, Player, Reply, Script, ScriptError, parse_script
from pawl.model_server.strict import check_request
from pawl.model_server.wire import DONE, MODEL_ID, Envelope, completion, event, stream_events

REQUESTS_RECORDED_MAX = 1_000
_JSON = {"content-type": "application/json"}
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_GARBLED = '{"choices": [{"delta": {"content": "…'

_log = logs.get_logger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class Recorded:
    """A model call and its outcome.

    `outcome` is `open` until the call is answered, and then `complete`, `refused`, `fault` (scripted) or `client_gone`.
    `body` is the parsed JSON, or None if the body was not JSON.
    """

    number: int
    body: Any
    outcome: str = "open"
    status: int = 200
    chunks_sent: int = 0


class ModelServer:
    """A model server. Run it with `async with ModelServer(script=...) as server`, and use `server.base_url`.

    On exit, all connections are closed. `play` can replace the script at any time, and `requests` contains the latest
    calls. The server refuses requests that OpenAI would refuse.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        reasoning_echo: bool = False,
    ) -> None:
        self._player = Player(script or Script())
        self._host = host
        self._port = port
        self._reasoning_echo = reasoning_echo
        self._connections: set[asyncio.Task[None]] = set()
        self.requests: deque[Recorded] = deque(maxlen=REQUESTS_RECORDED_MAX)
        self.request_count = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, self._host, self._port)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        """The listening address as host:port."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def base_url(self) -> str:
        return f"http://{self.address}/v1"

    def play(self, script: Script) -> None:
        """Replace the script and reset its counts. Answers in progress do not change."""
        self._player = Player(script)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(Connection(reader, writer).serve(self._handle))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _handle(self, request: Request, connection: Connection) -> None:
        match request.method, request.path.rstrip("/"):
            case "POST", "/v1/chat/completions" | "/chat/completions":
                await self._chat(request, connection)
            case "GET", "/v1/models" | "/models":
                model = {"id": MODEL_ID, "object": "model", "created": 0, "owned_by": "pawl", "description": SELF}
                await _send_json(connection, 200, {"object": "list", "data": [model]})
            case "GET", "/_pawl/requests":
                calls = [dataclasses.asdict(recorded) for recorded in self.requests]
                await _send_json(connection, 200, {"count": self.request_count, "requests": calls})
            case "POST", "/_pawl/script":
                await self._swap(request, connection)
            case _:
                error = RefusedRequest(f"Unknown request URL: {request.method} {request.path}.", status=404)
                await _send_json(connection, error.status, error.body())

    async def _swap(self, request: Request, connection: Connection) -> None:
        try:
            script = parse_script(request.body)
        except ScriptError as error:
            await _send_json(connection, 400, RefusedRequest(str(error), code="invalid_script").body())
        else:
            self.play(script)
            await _send_json(connection, 200, {"steps": len(script.steps)})

    async def _chat(self, request: Request, connection: Connection) -> None:
        self.request_count += 1
        recorded = Recorded(number=self.request_count, body=_json_or_none(request.body))
        self.requests.append(recorded)
        try:
            chat = read_request(request.body)
            check_request(chat, reasoning_echo=self._reasoning_echo)
            await _answer(chat, self._player.choose(chat) or reply_for(chat), connection, recorded)
        except RefusedRequest as error:
            recorded.outcome, recorded.status = "refused", error.status
            _log.warning("chat.refused", number=recorded.number, status=error.status, error=error.message)
            await _send_json(connection, error.status, error.body())
        except ClientGoneError:
            recorded.outcome = "client_gone"
            raise


async def _answer(chat: ChatRequest, reply: Reply, connection: Connection, recorded: Recorded) -> None:
    envelope = Envelope(
        completion_id=f"chatcmpl-{secrets.token_hex(8)}",
        created_unix_seconds=int(time.time()),
        prompt_characters=len(msgspec.json.encode(chat.messages)),
        include_usage=chat.stream_options is not None and chat.stream_options.include_usage,
    )
    recorded.outcome = "open" if reply.fault is None else "fault"
    match reply.fault:
        case Fault(type="status") as fault:
            recorded.status = fault.status
            await _send_status(connection, fault)
        case Fault(type="hang", after_chunks=0):
            await connection.pause(None)
        case Fault(type="reset", after_chunks=0):
            connection.reset()
        case _ if not chat.stream:
            await connection.send(200, _JSON, completion(reply, envelope))
        case _:
            await _stream(reply, envelope, connection, recorded)
    if recorded.outcome == "open":
        recorded.outcome = "complete"


async def _stream(reply: Reply, envelope: Envelope, connection: Connection, recorded: Recorded) -> None:
    events, fault = stream_events(reply, envelope), reply.fault
    before = len(events) if fault is None else 0 if fault.type == "empty_stream" else fault.after_chunks
    await connection.start(200, _EVENTS)
    await _send_events(events[:before], reply.chunk_delay, connection, recorded)
    match fault.type if fault else "":
        case "hang":
            await connection.pause(None)
        case "reset":
            await connection.pause(0.05)  # a reset discards data that the client has not read yet
            connection.reset()
        case "drop":
            connection.close()
        case "truncate" | "empty_stream":
            await connection.finish()
        case "error_object":
            error = RefusedRequest("The server had an error.", code="500", status=500)
            await connection.write(event(error.body()))
            await connection.finish()
        case kind:
            if kind == "garble":
                await connection.write(event(_GARBLED))
            await _send_events(events[before:], reply.chunk_delay, connection, recorded)
            await connection.write(DONE)
            await connection.finish()


async def _send_events(events: list[bytes], delay: float, connection: Connection, recorded: Recorded) -> None:
    if not delay and events:
        await connection.write(*events)
        recorded.chunks_sent += len(events)
        return
    for chunk in events:
        await connection.write(chunk)
        recorded.chunks_sent += 1
        await connection.pause(delay)


async def _send_status(connection: Connection, fault: Fault) -> None:
    headers, body = dict(_JSON), fault.body
    if fault.retry_after is not None:
        headers["retry-after"] = f"{fault.retry_after:g}"
    if body is msgspec.UNSET:
        body = RefusedRequest("This error was scripted.", status=fault.status).body()
    content = body.encode() if isinstance(body, str) else msgspec.json.encode(body)
    await connection.send(fault.status, headers, content)


async def _send_json(connection: Connection, status: int, body: Any) -> None:
    await connection.send(status, _JSON, msgspec.json.encode(body))


def _json_or_none(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None
