"""Streaming calls that the gateway relays on a few streams, each with the credential of its own user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.rpc.client import open_channel
from pawl.errors import (
    DependencyUnavailable,
    MethodNotFound,
    Overloaded,
    PermissionDenied,
    RunNotFound,
    ShuttingDown,
    Unauthenticated,
)
from pawl.server.rpc.server import RpcServer
from tests.poll import until
from tests.rpc.chassis.echo import EchoServicer, EchoStub, Serve
from tests.rpc.chassis.test_limits_and_access import ANN, BOB, GATEWAY, Known, bearer


@asynccontextmanager
async def relaying(
    serving: AbstractAsyncContextManager[RpcServer], key: str = GATEWAY
) -> AsyncIterator[tuple[EchoStub, RpcServer]]:
    async with serving as server, open_channel(server.address, relay_key=lambda: key) as channel:
        yield EchoStub(channel), server


async def test_relayed_calls_share_a_stream_but_each_has_its_own_caller(serve: Serve) -> None:
    async with relaying(serve(authenticator=Known())) as (stub, server):
        for key, name in ((ANN, "ann"), (BOB, "bob")):
            for kind in ("generate", "write"):
                assert await stub.call(kind, "who", metadata=bearer(key)) == ["first", f"user/acme/{name}"]
        assert len(server._batches._streams) == 1


async def test_relayed_call_fails_like_a_direct_call(serve: Serve) -> None:
    async with relaying(serve(authenticator=Known(), streams_max=3)) as (stub, _):
        refused: list[tuple[str, Any, type[Exception]]] = [
            ("who", (("pawl-user", "ann"),), Unauthenticated),
            ("who", bearer("another-key-0123456789"), Unauthenticated),
            ("who", (*bearer(ANN), *bearer(BOB)), Unauthenticated),
            ("who", (*bearer(ANN), ("pawl-user", "bob")), PermissionDenied),
            ("not-found", bearer(ANN), RunNotFound),
        ]
        for text, metadata, error in refused:
            with pytest.raises(error):
                await stub.call("generate", text, metadata=metadata)


async def test_relayed_calls_count_towards_the_limits_of_their_users(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known(), streams_max=4, user_share=0.25)) as (stub, _):
        call = asyncio.ensure_future(stub.call("generate", "wait", metadata=bearer(ANN)))
        await servicer.entered.wait()
        with pytest.raises(Overloaded):
            await stub.call("generate", "who", metadata=bearer(ANN))
        assert await stub.call("generate", "hello", metadata=bearer(BOB)) == ["first", "hello"]
        servicer.release.set()
        await call


async def test_revoked_key_ends_only_its_own_relayed_calls(serve: Serve, servicer: EchoServicer) -> None:
    known = Known()
    async with relaying(serve(authenticator=known, callers_seconds=0.01)) as (stub, _):
        ann, bob = [asyncio.ensure_future(stub.call("generate", "wait", metadata=bearer(key))) for key in (ANN, BOB)]
        await until(lambda: servicer.waiting == 2)
        del known.users[ANN]
        with pytest.raises(Unauthenticated, match="not valid"):
            await ann
        servicer.release.set()
        assert await bob == ["first", "wait"]


async def test_unread_relayed_call_pauses_without_delaying_others(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known())) as (stub, server):
        flood = stub.generate(StringValue(value="flood"), metadata=bearer(ANN))
        assert (await anext(flood)).value == "first"
        await servicer.entered.wait()
        for _ in range(5):
            assert await stub.call("generate", "big:300000", metadata=bearer(BOB)) == ["first", "x" * 300_000]
        (stream,) = server._batches._streams
        (relay,) = stream._relays.values()
        assert relay._unprocessed_bytes < 400_000
        for _ in range(20):
            assert len((await anext(flood)).value) == 100_000
        flood.cancel()
        await servicer.generator_closed.wait()


async def test_relayed_calls_end_with_shutting_down_when_the_server_stops(serve: Serve, servicer: EchoServicer) -> None:
    async with relaying(serve(authenticator=Known(), drain_seconds=60.0)) as (stub, server):
        call = asyncio.ensure_future(stub.call("generate", "wait", metadata=bearer(ANN)))
        await servicer.entered.wait()
        server._interceptor.stop_calls(drainable=False)
        with pytest.raises(ShuttingDown):
            await call


async def test_gateway_relays_only_public_streaming_methods(serve: Serve) -> None:
    """The gateway's key alone gives no rights."""
    async with relaying(serve(authenticator=Known(), service_only=True)) as (stub, _):
        with pytest.raises(MethodNotFound):
            await stub.call("generate", "who", metadata=bearer(ANN))
        with pytest.raises(PermissionDenied):
            await stub.call("generate", "who", metadata=())
    async with relaying(serve(authenticator=Known()), key=ANN) as (stub, _):
        with pytest.raises((PermissionDenied, DependencyUnavailable)):
            await stub.call("generate", "who", metadata=bearer(ANN))
