"""Streams of the suite, followed over reconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from pawl.agent.v1 import agent_pb2
from pawl.chassis.status import from_rpc_error
from pawl.cli.target import Target
from pawl.errors import SlowConsumer, Unavailable
from pawl.event.v1 import event_pb2, gap_pb2

_GIVE_UP_SECONDS: Final = 30.0
_SILENCE_SECONDS_MAX: Final = 45.0
_PAUSE_SECONDS: Final = 0.5


async def watch(target: Target, run_id: str, after_seq: int = 0) -> AsyncIterator[event_pb2.RunEvent | gap_pb2.Gap]:
    """Yield the events of a run after `after_seq`, each once, until its last one; a gap for those that are gone.

    Raises:
        grpc.aio.AioRpcError: as `responses` does.
    """

    def begin() -> Any:
        return target.agents.WatchRun(agent_pb2.WatchRunRequest(run_id=run_id, after_seq=after_seq))

    async for response in responses(begin, ends=True):
        for event in response.events:
            after_seq = event.seq
            yield event
        if response.HasField("gap"):
            after_seq = response.gap.to_seq
            yield response.gap


async def responses(begin: Callable[[], Any], *, ends: bool) -> AsyncIterator[Any]:
    """Yield what a stream brings, which begins anew when it is lost; if it never `ends`, also when it does.

    Survives what a watcher can survive: a replica that goes away, a stream that is
    silent for too long, being too slow.

    Raises:
        grpc.aio.AioRpcError: any other error, or no replica answered for 30 s.
    """
    loop = asyncio.get_running_loop()
    last_answer = loop.time()
    while True:
        stream = begin()
        try:
            while True:
                async with asyncio.timeout(_SILENCE_SECONDS_MAX):
                    response = await stream.read()
                if response is grpc.aio.EOF:
                    break
                last_answer = loop.time()
                yield response
            if ends:
                return
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            passing = isinstance(from_rpc_error(error), Unavailable | SlowConsumer)
            if not passing or loop.time() - last_answer > _GIVE_UP_SECONDS:
                raise
        finally:
            stream.cancel()
        await asyncio.sleep(_PAUSE_SECONDS)
