"""The model server of the benchmarks. It sends canned responses, so that its cost is small and equal for all subjects.

`python -m bench.model --port 0` prints its URL. It answers streamed chat completions and has no state between requests.
While a request has fewer tool results than `--tool-rounds`, the server answers with one call of the first tool in the
request. After that, it sends an answer of `--chunks` chunks. With `--interval`, the calls are repeated in the
background at that interval, `--stop-after` times. With `--chunk-milliseconds`, the pieces of an answer are sent one by
one: the role immediately, the first output one interval later, and the end of the answer one interval after the last
output.

With `--fault-percent`, that many requests fail, in turn with status 429, with status 500 and with a stream that is cut
in the middle. With `--outage-every`, the server closes all connections for the last `--outage-seconds` of each such
period.

For each request that was answered since the last `GET /times`, `GET /times` returns the time at which the request's
last byte arrived, and the times at which the first bytes of the answer, the first output and the last bytes were sent.
Times are seconds of the machine's monotonic clock, which is read just before the bytes are passed to the system.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import random
import re
import time
from collections.abc import Callable
from typing import Any, Final, cast

import uvloop

_TOOL_NAME: Final = re.compile(rb'"function"\s*:\s*\{[^{}]*?"name"\s*:\s*"(\w+)"')
_TOOL_RESULT: Final = re.compile(rb'"role"\s*:\s*"tool"')
_LENGTH: Final = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_END: Final = b"0\r\n\r\n"
_END_EVENTS: Final = 3

_REFUSED: Final = b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"

# For each request: arrival, first bytes, first output, last bytes.
Times = list[tuple[float, float, float, float]]


def event(choices: list[dict[str, Any]], **more: object) -> bytes:
    """Return one server-sent event, framed as an HTTP chunk."""
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "canned", "choices": choices}
    return chunk(b"data: " + json.dumps(body | more, separators=(",", ":")).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of HTTP/1.1."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def delta(finish: str | None = None, **fields: object) -> bytes:
    """Return an event with one delta, which has these fields."""
    return event([{"index": 0, "delta": fields, "finish_reason": finish}])


def end(finish: str) -> list[bytes]:
    """Return the events that end every answer."""
    usage = {"prompt_tokens": 100, "completion_tokens": 100, "total_tokens": 200}
    return [delta(finish), event([], usage=usage), chunk(b"data: [DONE]\n\n")]


def tool_answer(tool: str, number: int, more: str = "{}") -> list[bytes]:
    """Return the events of an answer with one call, whose arguments are sent in fragments and include `more`."""
    arguments = json.dumps({"key": f"item-{number}"} | json.loads(more))
    first = {"index": 0, "id": f"call_{number}", "type": "function", "function": {"name": tool, "arguments": ""}}
    fragments = [arguments[at : at + 6] for at in range(0, len(arguments), 6)]
    return [
        delta(role="assistant", content=None),
        delta(tool_calls=[first]),
        *(delta(tool_calls=[{"index": 0, "function": {"arguments": fragment}}]) for fragment in fragments),
        *end("tool_calls"),
    ]


def text_answer(chunks: int) -> list[bytes]:
    """Return the events of an answer of `chunks` text pieces. The last piece is always the same."""
    pieces = [*(f"word{n} " for n in range(chunks - 1)), "the end"]
    return [delta(role="assistant", content=""), *(delta(content=piece) for piece in pieces), *end("stop")]


def tool_name(request: bytes) -> bytes:
    """Return the name of the first function in a request, or `b""` if there is none."""
    named = _TOOL_NAME.search(request)
    return named[1] if named else b""


@functools.cache
def answers(tool: bytes, tool_rounds: int, chunks: int, more: str = "{}") -> list[list[bytes]]:
    """Return the answers to requests with zero, one and more tool results."""
    return [*(tool_answer(tool.decode(), number, more) for number in range(1, tool_rounds + 1)), text_answer(chunks)]


def series(interval: float, stop_after: int, *, delay_first: bool) -> str:
    """Return the arguments that make a call repeat, as JSON. Without an interval, the object is empty."""
    if not interval:
        return "{}"
    said = {"_executeAsync": True, "_interval": interval, "_stopAfter": stop_after, "_delayFirst": delay_first}
    return json.dumps(said | {"_reports": "end"})


class Faults:
    """Decides which requests fail. `every` and `outage` are seconds, and `every` is 0 for no outages."""

    def __init__(self, percent: float, every: float, outage: float) -> None:
        self._random = random.Random(1)  # the same faults in each measurement
        self._percent, self._every, self._outage = percent, every, outage
        self._began = time.monotonic()
        self._kinds = itertools.cycle(("429", "500", "cut"))

    def next(self) -> str:
        """Return the fault of a request: `down`, `429`, `500`, `cut`, or nothing."""
        since = time.monotonic() - self._began
        if self._every and since % self._every >= self._every - self._outage:
            return "down"
        return next(self._kinds) if self._random.random() * 100 < self._percent else ""


class Model(asyncio.Protocol):
    """A connection whose requests are answered in sequence."""

    def __init__(
        self,
        answers: Callable[[bytes], list[list[bytes]]],
        chunk_seconds: float,
        times: Times,
        faults: Faults,
    ) -> None:
        self._faults = faults
        self._answers = answers
        self._chunk_seconds = chunk_seconds
        self._times = times
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, _error: Exception | None) -> None:
        for task in self._tasks:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._buffer, 0, head)
        size = head + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < size:
            return
        request = bytes(self._buffer[:size])
        del self._buffer[:size]
        if request.startswith(b"GET"):
            self._answer_times()
        else:
            answers = self._answers(tool_name(request))
            answer = answers[min(len(_TOOL_RESULT.findall(request)), len(answers) - 1)]
            if fault := self._faults.next():
                self._fail(fault, answer)
            else:
                self._answer(answer, time.monotonic())

    def _fail(self, fault: str, answer: list[bytes]) -> None:
        assert self._transport is not None
        if fault.isdigit():
            self._transport.write(_REFUSED % int(fault))
            return
        if fault == "cut":
            self._transport.write(_HEAD + b"".join(answer[: len(answer) // 2]))
        self._transport.close()

    def _answer_times(self) -> None:
        assert self._transport is not None
        body = json.dumps(self._times).encode()
        self._times.clear()
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    def _answer(self, answer: list[bytes], arrived: float) -> None:
        assert self._transport is not None
        if self._chunk_seconds:
            task = asyncio.create_task(self._answer_slowly(answer, arrived))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        began = time.monotonic()
        self._transport.write(_HEAD + b"".join(answer) + _END)
        self._times.append((arrived, began, began, began))

    async def _answer_slowly(self, answer: list[bytes], arrived: float) -> None:
        assert self._transport is not None
        pieces = [_HEAD + answer[0], *answer[1:-_END_EVENTS], b"".join(answer[-_END_EVENTS:]) + _END]
        went: list[float] = []
        for piece in pieces:
            if went:
                await asyncio.sleep(max(0.0, went[0] + len(went) * self._chunk_seconds - time.monotonic()))
            went.append(time.monotonic())
            self._transport.write(piece)
        self._times.append((arrived, went[0], went[1], went[-1]))


async def serve(port: int, *, tool_rounds: int, chunks: int, chunk_seconds: float, more: str, faults: Faults) -> None:
    times: Times = []
    loop = asyncio.get_running_loop()
    told = functools.partial(answers, tool_rounds=tool_rounds, chunks=chunks, more=more)
    server = await loop.create_server(lambda: Model(told, chunk_seconds, times, faults), "127.0.0.1", port)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tool-rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--chunk-milliseconds", type=float, default=0)
    parser.add_argument("--interval", type=float, default=0)
    parser.add_argument("--stop-after", type=int, default=1)
    parser.add_argument("--delay-first", type=int, default=0)
    parser.add_argument("--fault-percent", type=float, default=0)
    parser.add_argument("--outage-every", type=float, default=0)
    parser.add_argument("--outage-seconds", type=float, default=0)
    options = parser.parse_args()
    uvloop.run(
        serve(
            options.port,
            tool_rounds=options.tool_rounds,
            chunks=options.chunks,
            chunk_seconds=options.chunk_milliseconds / 1000,
            faults=Faults(options.fault_percent, options.outage_every, options.outage_seconds),
            more=series(options.interval, options.stop_after, delay_first=bool(options.delay_first)),
        )
    )


if __name__ == "__main__":
    main()
