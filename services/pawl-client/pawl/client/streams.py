"""Provides streams that survive reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import grpc

from pawl.client.target import NoAnswer
from pawl.errors import PawlError, SlowConsumer, Unavailable

SILENCE_SECONDS_MAX: Final = 45.0
_PAUSE_SECONDS: Final = 0.5


async def responses(open_stream: Callable[[], Any], *, ends: bool, retry_seconds: float) -> AsyncGenerator[Any, None]:
    """Yield a stream's responses. If the stream is lost, open it again.

    Unless `ends` is set, the stream is also reopened when the server ends it. This covers replicas that stop, streams
    that are silent for too long (servers send a heartbeat every 15 or 30 s), and slow consumers.

    Raises:
        PawlError: No replica answered within `retry_seconds` (NoAnswer if the stream was silent), or any other error
            occurred.
    """
    loop = asyncio.get_running_loop()
    last_answer = loop.time()
    while True:
        stream, answered = open_stream(), False
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
