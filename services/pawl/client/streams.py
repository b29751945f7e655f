"""Streams of the suite, followed over reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import grpc

from pawl.errors import SlowConsumer, Unavailable

GIVE_UP_SECONDS: Final = 30.0
SILENCE_SECONDS_MAX: Final = 45.0
_PAUSE_SECONDS: Final = 0.5


async def responses(begin: Callable[[], Any], *, ends: bool) -> AsyncGenerator[Any, None]:
    """Yield what a stream brings, which begins anew when it is lost; if it never `ends`, also when it does.

    Survives what a watcher can survive: a replica that goes away, a stream that is
    silent for too long, being too slow.

    Raises:
        PawlError: any other error, or no replica answered for 30 s.
    """
    loop = asyncio.get_running_loop()
    last_answer = loop.time()
    while True:
        stream = begin()
        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS_MAX):
                    response = await stream.read()
                if response is grpc.aio.EOF:
                    break
                last_answer = loop.time()
                yield response
            if ends:
                return
        except TimeoutError:
            pass
        except (Unavailable, SlowConsumer):
            if loop.time() - last_answer > GIVE_UP_SECONDS:
                raise
        finally:
            stream.cancel()
        await asyncio.sleep(_PAUSE_SECONDS)
