"""What a client is told when a call goes wrong, for every kind of RPC, and that each place comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.chassis.rpc_client import open_channel, translating
from pawl.chassis.rpc_interceptor import Interceptor
from pawl.chassis.rpc_server import RpcServer
from pawl.chassis.status import from_rpc_error
from pawl.errors import (
    Cancelled,
    Internal,
    MalformedRequest,
    MethodNotFound,
    PawlError,
    RunNotFound,
    TooLarge,
)
from tests.poll import until
from tests.rpc.chassis.echo import KINDS, SERVICE, EchoServicer, EchoStub, Serve, echoing


async def refusal(call: Any) -> PawlError:
    """Return the error that a call ends with."""
    with pytest.raises(PawlError) as caught, translating():
        await call
    return caught.value


async def test_every_kind_of_call_is_answered_or_fails_with_the_error_that_was_meant(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    meant = {
        "not-found": RunNotFound,
        "group": RunNotFound,
        "gone": Cancelled,
        "gone-group": Cancelled,
        # What is over our limit, and what gRPC itself does not read any more.
        "x" * 110_000: TooLarge,
        "x" * 2_000_000: TooLarge,
    }
    async with serve(message_bytes_max=100_000) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        for kind in KINDS:
            assert await stub.call(kind, "hello") in (["hello"], ["first", "hello"]), kind
            found = {how: type(await refusal(stub.call(kind, how))) for how in meant}
            assert found == meant, kind
            assert type(await refusal(raw.send(kind, b"\xff\xff\xff"))) is MalformedRequest, kind
            for how in ("abort", "abort-group"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.call(kind, how)
                told = (caught.value.code(), caught.value.details())
                assert told == (grpc.StatusCode.DATA_LOSS, "as the servicer says"), kind
        assert type(await refusal(stub.missing(StringValue()))) is MethodNotFound
        assert type(await refusal(anext(aiter(stub.missing_stream(iter([StringValue()])))))) is MethodNotFound
    async with serve() as server, open_channel(server.address, message_bytes_max=1000) as channel:
        assert type(await refusal(EchoStub(channel).call("unary", "big:2000"))) is TooLarge, "no overload"
    assert "rpc.failed" not in capfd.readouterr().out, "none of that is a fault of the program"


async def test_the_text_of_an_uncaught_exception_stays_here(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    """I22: an exception's text may hold secrets; the client gets an id that finds it in the log."""
    async with serve() as server, open_channel(server.address) as channel:
        for kind in KINDS:
            for how in ("crash", "crash-group", "timeout"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await EchoStub(channel).call(kind, how)
                assert caught.value.code() is grpc.StatusCode.INTERNAL, (kind, how)
                assert "hunter2" not in repr((caught.value.details(), caught.value.trailing_metadata()))
                error = from_rpc_error(caught.value)
                assert type(error) is Internal
                assert error.metadata["error_id"] in "".join(capfd.readouterr())


async def test_a_deadline_ends_the_handler_before_its_client_gives_up_or_never_starts_it(
    serve: Serve, servicer: EchoServicer
) -> None:
    """The work itself is cancelled, and the client is still there to be told why (LOOP-6, C11)."""
    async with echoing(serve()) as stub:
        await stub.call("unary", "connect first")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.call("unary", "wait", timeout=0.01)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not servicer.entered.is_set()

        async def is_told(kind: str) -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.call(kind, "wait", timeout=1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata() or ())

        for kind in KINDS:
            servicer.cancelled.clear()
            await until(lambda kind=kind: is_told(kind))  # type: ignore[misc]  # A busy machine may take longer.
            await servicer.cancelled.wait()


async def test_a_client_that_goes_away_cancels_the_handler_and_closes_its_generator(
    serve: Serve, servicer: EchoServicer
) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        for kind in KINDS:
            servicer.entered.clear()
            servicer.cancelled.clear()
            call = asyncio.ensure_future(EchoStub(channel).call(kind, "wait"))
            await servicer.entered.wait()
            call.cancel()
            await servicer.cancelled.wait()
            with pytest.raises(asyncio.CancelledError):
                await call
        servicer.generator_closed.clear()
        servicer.entered.clear()
        flood = EchoStub(channel).generate(StringValue(value="flood"))
        await flood.read()
        await servicer.entered.wait()
        flood.cancel()  # In the middle of a write: what the generator holds is given back now.
        await servicer.generator_closed.wait()


async def test_a_servicer_may_answer_before_it_has_read_everything(serve: Serve, servicer: EchoServicer) -> None:
    async def requests() -> AsyncIterator[StringValue]:
        yield StringValue(value="enough")
        await servicer.release.wait()

    async with serve() as server, open_channel(server.address) as channel:
        assert (await anext(EchoStub(channel).talk(requests()))).value == "enough"
        assert (await EchoStub(channel).collect(requests())).value == "enough"
        servicer.release.set()


_TEXTS = ("hello", "crash", "not-found", "group", "abort", "wait", "long-poll", "turns:3", "big:300000", "timeout")
_METHODS = ("Unary", "Generate", "Write", "Collect", "Talk", "Missing")
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
