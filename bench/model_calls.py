"""The CPU cost of a model call in the client: with the openai client, its raw stream, and Pawl's client.

`python -m bench.model_calls` prints the CPU time per call in microseconds, as the minimum of several turns.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, cast

import httpx2
import msgspec
import openai
import uvloop

from pawl.agent_loop.model.answer import Answer
from pawl.agent_loop.model.client import OpenAiModel
from pawl.agent_loop.model.request import ModelRequest

_USER: Final = {"role": "user", "content": "What is stored under item-1?"}
_TOOL: Final = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# With this many tool results, the server writes its long answer.
_RESULT: Final = {"role": "tool", "tool_call_id": "call_1", "content": "42"}
ANSWERS: Final = {"1 tool call": (_USER,), "100 chunks": (_USER, _RESULT)}

Call = Callable[[tuple[Any, ...]], Awaitable[int]]


def handwritten(client: openai.AsyncOpenAI) -> Call:
    """Return a function that makes a call as in the client's documentation."""

    async def call(messages: tuple[Any, ...]) -> int:
        stream = await client.chat.completions.create(
            model="canned",
            messages=messages,
            tools=cast("Any", [_TOOL]),
            stream=True,
            stream_options={"include_usage": True},
        )
        return len([chunk async for chunk in stream])

    return call


def bare(client: openai.AsyncOpenAI) -> Call:
    """Return a function that makes a call with only the client's byte stream."""

    async def call(messages: tuple[Any, ...]) -> int:
        body = {"model": "canned", "messages": messages, "tools": [_TOOL], "stream": True}
        response: Any = await client.post(
            "/chat/completions",
            cast_to=httpx2.Response,
            content=msgspec.json.encode(body),
            options={"headers": {"Content-Type": "application/json"}},
            stream=True,
            stream_cls=openai.AsyncStream[Any],
        )
        answer = Answer()
        data: AsyncIterator[bytes] = response.aiter_bytes()
        count = sum([len(list(answer.feed(part))) async for part in data])
        await response.aclose()
        return count + len(answer.end())

    return call


def pawl(model: OpenAiModel) -> Call:
    """Return a function that makes a call in the same way as agent-loop."""

    async def call(messages: tuple[Any, ...]) -> int:
        request = ModelRequest(model="canned", messages=messages, tools=(_TOOL,))
        async with aclosing(model.stream(request)) as pieces:
            return len([piece async for piece in pieces])

    return call


async def cpu_microseconds(call: Call, messages: tuple[Any, ...], *, count: int, at_once: int) -> float:
    """Return the average CPU time of `count` calls in microseconds, with `at_once` of them running concurrently."""

    async def caller() -> None:
        for _ in range(count // at_once):
            assert await call(messages) > 1

    began = time.process_time()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    return (time.process_time() - began) / count * 1e6


async def measure(url: str, *, count: int, turns: int) -> None:
    """Print a table of the CPU times."""
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="none") as client,
        OpenAiModel(base_url=url, api_key="") as model,
    ):
        ways = {"openai": handwritten(client), "openai, bytes only": bare(client), "pawl": pawl(model)}
        for name, messages in ANSWERS.items():
            for at_once in (1, 32):
                least = dict.fromkeys(ways, float("inf"))
                for _ in range(turns):
                    for way, call in ways.items():
                        cost = await cpu_microseconds(call, messages, count=count, at_once=at_once)
                        least[way] = min(least[way], cost)
                told = ", ".join(f"{way} {cost:.0f}" for way, cost in least.items())
                print(f"{name}, {at_once} at once: {told} us a call", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=320)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    server = [sys.executable, "-m", "bench.model", "--tool-rounds", "1"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            uvloop.run(measure(url, count=options.count, turns=options.turns))
        finally:
            process.kill()


if __name__ == "__main__":
    main()
