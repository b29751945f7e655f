"""What a channel makes of streams of responses."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.rpc_client import open_channel
from tests.poll import until
from tests.rpc.chassis.echo import SERVICE, EchoServicer, EchoStub, Serve
from tests.rpc.chassis.test_replicas import Line


class Response:
    """A response that one can watch go."""

    def __init__(self, raw: bytes) -> None:
        self.value = StringValue.FromString(raw).value


def generate(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream(
        f"/{SERVICE}/Generate",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=Response,
    )


async def test_a_server_that_is_slow_to_let_one_in_is_waited_for(serve: Serve) -> None:
    """A busy machine takes some tenths of a second for a connection; that is no server that does not answer."""
    for batches in (False, True):
        async with serve(service_only=batches, listen="127.0.0.1:0") as server, Line(server.address) as line:
            line.carries.clear()
            asyncio.get_running_loop().call_later(0.4, line.carries.set)
            async with open_channel(line.address, batches=batches) as channel:
                assert await EchoStub(channel).call("unary", "hello") == ["hello"]


async def test_a_stream_keeps_no_response_while_it_waits_for_the_next(servicer: EchoServicer, serve: Serve) -> None:
    """Thousands of streams may wait for hours, each after a page of a log."""
    there: weakref.WeakSet[Response] = weakref.WeakSet()
    seen: list[str] = []

    async def read(call: Any) -> None:
        async for response in call:
            there.add(response)
            seen.append(response.value)
            del response

    async with asyncio.timeout(60), serve() as server, open_channel(server.address) as channel:
        reading = asyncio.create_task(read(generate(channel)(StringValue(value="wait"))))
        await servicer.entered.wait()
        await until(lambda: seen)
        gc.collect()
        assert not list(there)
        servicer.release.set()
        await reading
    assert seen == ["first", "wait"]
