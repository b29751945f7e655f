"""Each place that a call takes comes back, whenever and however its client leaves."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.chassis.rpc_interceptor import Interceptor
from pawl.chassis.rpc_server import RpcServer
from tests.rpc.chassis.echo import KINDS, SERVICE, EchoServicer, EchoStub, Serve

_TEXTS = ("hello", "crash", "not-found", "group", "abort", "wait", "long-poll", "turns:3", "big:300000", "timeout")
_METHODS = ("Unary", "Generate", "Write", "Collect", "Talk", "ReadAndWrite", "Missing")
_OWN = [("grpc.use_local_subchannel_pool", 1)]


@pytest.mark.parametrize("seed", range(2))
async def test_every_place_comes_back_whatever_clients_do(serve: Serve, servicer: EchoServicer, seed: int) -> None:
    rng = random.Random(seed)
    limits = {"unary_calls_max": 30, "streams_max": 30, "store_share": 0.5, "user_share": 0.3}
    async with serve(**limits) as server:
        for _ in range(3):
            channels = [grpc.aio.insecure_channel(server.address, _OWN) for _ in range(4)]
            # Their methods first: gRPC does not survive it if one is asked for on a channel that is closed.
            callers = [_Caller(channel) for channel in channels]
            doing = [asyncio.ensure_future(rng.choice(callers).do_something(rng)) for _ in range(100)]
            while True:
                running = [one for one in doing if not one.done()]
                if not running:
                    break
                for one in rng.sample(running, min(9, len(running))):
                    one.cancel()
                if rng.random() < 0.1:
                    # All calls of a client at once.
                    await rng.choice(channels).close()
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
            await asyncio.gather(*doing, return_exceptions=True)
            for channel in channels:
                await channel.close()
            servicer.release.set()
            await _wait_until_empty(server)
            servicer.release.clear()
        async with grpc.aio.insecure_channel(server.address) as channel:
            assert await EchoStub(channel).call("unary", "hello") == ["hello"]


class _Caller:
    """A client that does what comes to its mind."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._echo = EchoStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        # As streams, whatever they are, so that requests can be left out.
        self._bare: list[Any] = [channel.stream_stream(f"/{SERVICE}/{name}") for name in _METHODS]
        self._bare.append(channel.stream_stream("/grpc.health.v1.Health/Check"))

    async def do_something(self, rng: random.Random) -> None:
        who = (("pawl-store", rng.choice("ab")), ("pawl-user", rng.choice("xyz")))
        timeout = rng.choice([None, None, 0.001, 0.01])
        match rng.randrange(5):
            case 0:
                async for _ in self._health.Watch(health_pb2.HealthCheckRequest(), timeout=timeout):
                    pass
            case 1:
                call = rng.choice(self._bare)(metadata=who, timeout=timeout)
                if rng.random() < 0.5:
                    await call.write(StringValue(value=rng.choice(_TEXTS)).SerializeToString())
                await call.read()
            case _:
                await self._echo.call(rng.choice(KINDS), rng.choice(_TEXTS), metadata=who, timeout=timeout)


async def _wait_until_empty(server: RpcServer) -> None:
    left: dict[str, int] = {}
    try:
        async with asyncio.timeout(60):
            while left := _left(server._interceptor):  # nothing else can tell
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"these do not come back: {left}")


def _left(interceptor: Interceptor) -> dict[str, int]:
    inside, turns = vars(interceptor), vars(interceptor.arrivals)
    sizes = {
        name: len(inside[name]) for name in ("_active", "_unary_calls", "streams", "request_streams", "_strangers")
    }
    sizes |= {name: len(turns[name]) for name in ("_turns", "_callers")}
    sizes["arriving"] = len(interceptor.strangers_arriving)
    return {name: size for name, size in sizes.items() if size}
