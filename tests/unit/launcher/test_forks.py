"""Programs are started beside running gRPC calls, as the embedded database is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import grpc.aio


async def _call_for_ever(channel: grpc.aio.Channel) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/pawl.Nothing/Call")
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call(b"", timeout=60)


async def test_a_program_started_in_the_middle_of_calls_runs() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for _ in range(4)]
    calls = [asyncio.create_task(_call_for_ever(channel)) for channel in channels]
    # With a user, Python forks for real, where it could otherwise use vfork.
    codes = [(await asyncio.to_thread(subprocess.run, "true", user=os.getuid())).returncode for _ in range(100)]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.gather(*(channel.close() for channel in channels))
    await server.stop(None)
    assert codes == [0] * 100
