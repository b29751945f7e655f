"""Streams of the suite, followed over reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import grpc

from pawl.client.target import NoAnswer
from pawl.errors import PawlError, SlowConsumer, Unavailable

SILENCE_SECONDS_MAX: Final = 45.0
_PAUSE_SECONDS: Final = 0.5


async def responses(begin: Callable[[], Any], *, ends: bool, retry_seconds: float) -> AsyncGenerator[Any, None]:
    """Yield what a stream brings, which begins anew when it is lost; if it never `ends`, also when it does.

    Survives what a watcher can survive: a replica that goes away, a stream that is
    silent for too long (servers give a sign of life every 15 s), being too slow.

    Raises:
        PawlError: any other error, or no replica answered for `retry_seconds` (NoAnswer if silent).
    """
    loop = asyncio.get_running_loop()
    last_answer = loop.time()
    while True:
        stream, answered = begin(), False
        lost: PawlError | None = None
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS_MAX):
                    response = await stream.read()
                if response is grpc.aio.EOF:
                    break
                answered = True
                yield response
            if ends:
                return
        except TimeoutError:
            lost = NoAnswer(f"the stream was silent for {SILENCE_SECONDS_MAX:g} s")
        except (Unavailable, SlowConsumer) as error:
            lost = error
        finally:
            stream.cancel()
        if answered or lost is None:
            last_answer = loop.time()
        elif loop.time() - last_answer >= retry_seconds:
            raise lost
        await asyncio.sleep(_PAUSE_SECONDS)
