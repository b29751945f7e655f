from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis import status
from pawl.errors import (
    DependencyUnavailable,
    InvalidField,
    NotFound,
    Overloaded,
    PawlError,
    TooLarge,
    by_kind,
    by_reason,
)


class Context:
    """Keeps what an RPC is ended with."""

    def __init__(self) -> None:
        self.error: grpc.aio.AioRpcError | None = None

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("pawl-request-id", "req_1"),)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str | bytes], ...]) -> None:
        self.error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


async def carry(error: PawlError) -> grpc.aio.AioRpcError:
    context: Any = Context()
    abort: Any = status.abort
    await abort(context, error)
    assert isinstance(context.error, grpc.aio.AioRpcError)
    return context.error


def bare(code: grpc.StatusCode, details: str = "") -> PawlError:
    return status.from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


async def test_every_error_arrives_as_itself() -> None:
    assert set(status.CODES) == set(by_kind)
    for reason, error in by_reason.items():
        sent = error("what to do", field="name")
        carried = await carry(sent)
        assert carried.code().name == sent.kind.value
        got = status.from_rpc_error(carried)
        assert (type(got), got.message, got.reason) == (type(sent), "what to do", reason)
        assert got.metadata == {"field": "name"}
        assert (carried.trailing_metadata() or {})["pawl-request-id"] == "req_1"


@given(st.text(max_size=5000), st.dictionaries(st.sampled_from(["field", "x"]), st.text(max_size=2000)))
async def test_a_long_message_still_fits_in_a_trailer(message: str, metadata: dict[str, str]) -> None:
    """Clients drop a response whose headers are over 8 KiB."""
    carried = await carry(InvalidField(message, **metadata))
    details = (carried.trailing_metadata() or {})["grpc-status-details-bin"]
    assert len((carried.details() or "").encode()) * 3 + len(details) * 4 / 3 < 7500
    assert type(status.from_rpc_error(carried)) is InvalidField


async def test_a_reason_of_a_later_version_keeps_its_kind_and_name() -> None:
    """I23."""
    carried = await carry(NotFound.restore("gone", "GOAT_NOT_FOUND", {"goat": "billy"}))
    got = status.from_rpc_error(carried)
    assert (type(got), got.reason, got.metadata) == (NotFound, "GOAT_NOT_FOUND", {"goat": "billy"})


def test_what_grpc_itself_says_is_some_error_and_not_in_its_words() -> None:
    assert {isinstance(bare(code), PawlError) for code in grpc.StatusCode if code is not grpc.StatusCode.OK} == {True}
    assert type(bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)")) is TooLarge
    assert type(bare(grpc.StatusCode.RESOURCE_EXHAUSTED)) is Overloaded
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        error = bare(code, "ipv4:127.0.0.1:42127: backend unhealthy")
        assert (type(error), "127.0.0.1" in error.message) == (DependencyUnavailable, False), code


def test_a_peer_that_answers_too_late_is_away() -> None:
    """The deadline was set by whoever asked it, not by who asked them."""
    assert type(status.of_peer(bare(grpc.StatusCode.DEADLINE_EXCEEDED))) is DependencyUnavailable
    assert type(status.of_peer(NotFound())) is NotFound


def test_details_of_somebody_else_are_not_taken_for_ours() -> None:
    info = error_details_pb2.ErrorInfo(reason="RUN_NOT_FOUND", domain="elsewhere.example")
    wire = status_pb2.Status(code=5)
    wire.details.add().Pack(info)
    for details in (wire.SerializeToString(), b"\xff\xff"):
        trailing = grpc.aio.Metadata(("grpc-status-details-bin", details))
        error = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing)
        assert type(status.from_rpc_error(error)) is NotFound
