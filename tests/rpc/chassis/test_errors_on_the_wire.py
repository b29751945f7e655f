"""Errors of failed calls for every RPC kind, and the release of their slots."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from pawl.chassis.rpc.client import open_channel, translating
from pawl.chassis.rpc.status import from_rpc_error
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
from tests.rpc.chassis.echo import KINDS, EchoServicer, EchoStub, Serve, echoing


async def refusal(call: Any) -> PawlError:
    with pytest.raises(PawlError) as caught, translating():
        await call
    return caught.value


async def test_every_kind_of_call_returns_a_response_or_the_intended_error(
    serve: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    meant = {
        "not-found": RunNotFound,
        "group": RunNotFound,
        "gone": Cancelled,
        "gone-group": Cancelled,
        # Messages above Pawl's limit and above gRPC's limit.
        "x" * 110_000: TooLarge,
        "x" * 2_000_000: TooLarge,
    }
    async with serve(message_bytes_max=100_000) as server, open_channel(server.address) as channel:
        stub, raw = EchoStub(channel), EchoStub(channel, raw=True)
        for kind in KINDS:
            assert await stub.call(kind, "hello") in (["hello"], ["first", "hello"]), kind
            assert {how: type(await refusal(stub.call(kind, how))) for how in meant} == meant, kind
            assert type(await refusal(raw.send(kind, b"\xff\xff\xff"))) is MalformedRequest, kind
            for how in ("abort", "abort-group"):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.call(kind, how)
                status = (caught.value.code(), caught.value.details())
                assert status == (grpc.StatusCode.DATA_LOSS, "as the servicer says"), kind
        assert type(await refusal(stub.missing(StringValue()))) is MethodNotFound
        assert type(await refusal(anext(aiter(stub.missing_stream(iter([StringValue()])))))) is MethodNotFound
    async with serve() as server, open_channel(server.address, message_bytes_max=1000) as channel:
        assert type(await refusal(EchoStub(channel).call("unary", "big:2000"))) is TooLarge, "no overload"
    assert "rpc.failed" not in capfd.readouterr().out, "none of these is an internal error"


async def test_uncaught_exception_text_is_not_sent(serve: Serve, capfd: pytest.CaptureFixture[str]) -> None:
    """I22: an exception's text may contain secrets, so the client only gets an id to find in the log."""
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


async def test_deadline_cancels_the_handler_before_the_client_times_out(serve: Serve, servicer: EchoServicer) -> None:
    """LOOP-6, C11: the handler is cancelled while the client still waits for the error."""
    async with echoing(serve()) as stub:
        await stub.call("unary", "connect first")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.call("unary", "wait", timeout=0.01)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not servicer.entered.is_set()

        async def is_cancelled(kind: str) -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.call(kind, "wait", timeout=1)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata() or ())

        for kind in KINDS:
            servicer.cancelled.clear()
            await until(lambda kind=kind: is_cancelled(kind))  # type: ignore[misc]  # A busy machine may take longer.
            await servicer.cancelled.wait()
