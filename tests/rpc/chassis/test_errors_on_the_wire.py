"""What a client is told when a call goes wrong, for every kind of RPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.rpc_client import open_channel, translating
from pawl.chassis.rpc_kinds import read_raw
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
from tests.rpc.chassis.echo import KINDS, EchoServicer, EchoStub, Serve

every_kind = pytest.mark.parametrize("kind", KINDS)


async def refusal(call: Any) -> PawlError:
    """Return the error that a call ends with."""
    with pytest.raises(PawlError) as caught, translating():
        await call
    return caught.value


@every_kind
async def test_a_call_is_answered(serve: Serve, kind: str) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        answers = await EchoStub(channel).call(kind, "hello")
        assert answers in (["hello"], ["first", "hello"])


@every_kind
async def test_malformed_bytes_are_an_invalid_argument(serve: Serve, kind: str) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        error = await refusal(EchoStub(channel, raw=True).send(kind, b"\xff\xff\xff"))
        assert type(error) is MalformedRequest


@every_kind
async def test_an_error_of_ours_arrives_as_itself(serve: Serve, kind: str) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        error = await refusal(EchoStub(channel).call(kind, "not-found"))
        assert type(error) is RunNotFound
        assert error.message == "No such run, or none that the caller may see"


@every_kind
@pytest.mark.parametrize("how", ["crash", "crash-group", "timeout"])
async def test_the_text_of_an_uncaught_exception_stays_here(
    serve: Serve, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """I22: an exception's text may hold secrets; the client gets an id that finds it in the log."""
    async with serve() as server, open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EchoStub(channel).call(kind, how)
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "hunter2" not in repr((caught.value.details(), caught.value.trailing_metadata()))
        error = await refusal(EchoStub(channel).call(kind, how))
        assert type(error) is Internal
        output = capfd.readouterr()
        assert error.metadata["error_id"] in output.out + output.err


@every_kind
async def test_a_failed_task_group_is_the_error_that_failed_it(serve: Serve, kind: str) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        assert type(await refusal(EchoStub(channel).call(kind, "group"))) is RunNotFound


@every_kind
@pytest.mark.parametrize("how", ["abort", "abort-group"])
async def test_what_a_servicer_aborts_with_is_what_arrives(
    serve: Serve, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await EchoStub(channel).call(kind, how)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "as the servicer says")
    assert "rpc.failed" not in capfd.readouterr().out


@every_kind
@pytest.mark.parametrize("how", ["gone", "gone-group"])
async def test_a_client_that_goes_away_in_a_write_is_no_fault_of_the_program(
    serve: Serve, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        assert type(await refusal(EchoStub(channel).call(kind, how))) is Cancelled
    assert "rpc.failed" not in capfd.readouterr().out


async def test_a_client_that_goes_away_before_it_is_refused_is_no_fault_of_the_program(
    serve: Serve, servicer: EchoServicer, caplog: pytest.LogCaptureFixture
) -> None:
    """The program hangs meanwhile, so gRPC notices that the status cannot be sent before it is told of the cancel."""
    async with serve() as server, open_channel(server.address) as channel:
        call = EchoStub(channel).unary(StringValue(value="vanish"))

        def vanish() -> None:
            call.cancel()
            time.sleep(0.2)

        servicer.vanish = vanish
        with pytest.raises(asyncio.CancelledError):
            await call
    # gRPC says so of itself where there was nothing to read from its poller after all.
    assert [said for said in caplog.messages if "PollerCompletionQueue" not in said] == []


async def test_a_client_that_is_gone_before_the_answer_begins_costs_nothing(servicer: EchoServicer) -> None:
    """A method that was called and never awaited would be a warning in the log."""

    class Gone:
        async def send_initial_metadata(self, _: object) -> None:
            raise asyncio.CancelledError

    handler: Any = grpc.unary_stream_rpc_method_handler(servicer.generate, StringValue.FromString)

    async def receive(_: object) -> bytes:
        return b""

    behaviour = read_raw(handler, receive, bytes_max=1000)
    context: Any = Gone()
    with pytest.raises(asyncio.CancelledError):
        await behaviour(b"", context)
    assert servicer.generator is None


@pytest.mark.parametrize("size", [110_000, 2_000_000])
@every_kind
async def test_an_oversized_message_is_refused(serve: Serve, kind: str, size: int) -> None:
    """Both what is over our limit and what gRPC itself does not read any more."""
    async with serve(message_bytes_max=100_000) as server, open_channel(server.address) as channel:
        error = await refusal(EchoStub(channel).call(kind, "x" * size))
        assert type(error) is TooLarge


async def test_an_oversized_answer_is_told_apart_from_an_overload(serve: Serve) -> None:
    async with serve() as server, open_channel(server.address, message_bytes_max=1000) as channel:
        assert type(await refusal(EchoStub(channel).call("unary", "big:2000"))) is TooLarge


async def test_an_unknown_method_is_unimplemented(serve: Serve) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        assert type(await refusal(stub.missing(StringValue()))) is MethodNotFound
        assert type(await refusal(anext(aiter(stub.missing_stream(iter([StringValue()])))))) is MethodNotFound


@every_kind
async def test_a_handler_ends_before_its_client_gives_up(serve: Serve, servicer: EchoServicer, kind: str) -> None:
    """The work itself is cancelled, and the client is still there to be told why (LOOP-6, C11)."""
    async with serve() as server, open_channel(server.address) as channel:

        async def is_told() -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await EchoStub(channel).call(kind, "wait", timeout=2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata() or ())

        await until(is_told)  # A busy machine may take longer for it than is left then.
        await servicer.cancelled.wait()


async def test_a_deadline_that_leaves_no_time_is_exceeded_at_once(serve: Serve, servicer: EchoServicer) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        stub = EchoStub(channel)
        await stub.call("unary", "connect first")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.call("unary", "wait", timeout=0.01)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not servicer.entered.is_set()


@every_kind
async def test_a_client_that_goes_away_cancels_the_handler(serve: Serve, servicer: EchoServicer, kind: str) -> None:
    async with serve() as server, open_channel(server.address) as channel:
        call = asyncio.ensure_future(EchoStub(channel).call(kind, "wait"))
        await servicer.entered.wait()
        call.cancel()
        await servicer.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_generator_is_closed_when_its_client_goes_away_during_a_write(
    serve: Serve, servicer: EchoServicer
) -> None:
    """Not left to the garbage collector: what it holds is given back now."""
    async with serve() as server, open_channel(server.address) as channel:
        call = EchoStub(channel).generate(StringValue(value="flood"))
        await call.read()
        await servicer.entered.wait()
        call.cancel()
        await servicer.generator_closed.wait()


@pytest.mark.parametrize("kind", ["collect", "talk"])
async def test_a_servicer_may_answer_before_it_has_read_everything(
    serve: Serve, servicer: EchoServicer, kind: str
) -> None:
    async def requests() -> AsyncIterator[StringValue]:
        yield StringValue(value="enough")
        await servicer.release.wait()

    async with serve() as server, open_channel(server.address) as channel:
        call = getattr(EchoStub(channel), kind)(requests())
        assert (await (call if kind == "collect" else anext(call))).value == "enough"
        servicer.release.set()


async def test_the_code_unknown_is_never_seen(serve: Serve) -> None:
    async with serve(message_bytes_max=1000) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        for kind in KINDS:
            requests = [
                *(stub.call(kind, how) for how in ("crash", "crash-group", "group", "not-found", "abort", "timeout")),
                stub.call(kind, "x" * 1100),
                stub.call(kind, "x" * 9000),
                raw.send(kind, b"\xff"),
            ]
            for error in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(error, grpc.aio.AioRpcError)
                assert error.code() is not grpc.StatusCode.UNKNOWN, error
