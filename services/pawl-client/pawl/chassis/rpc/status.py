"""The mapping between error kinds and gRPC codes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships .pyi but no py.typed

from pawl.batch.v1 import batch_pb2
from pawl.chassis.visible import shortened
from pawl.errors import (
    DeadlineExceeded,
    DependencyUnavailable,
    Kind,
    Overloaded,
    PawlError,
    TooLarge,
    by_kind,
    by_reason,
)

DOMAIN: Final = "pawl"

_DETAILS_KEY: Final = "grpc-status-details-bin"
# Clients drop a response whose headers exceed 8 KiB. The message is sent twice: percent-encoded, with up to three bytes
# for each byte, and in base64.
_MESSAGE_BYTES_MAX: Final = 1200
_METADATA_BYTES_MAX: Final = 200

_UNREACHABLE: Final = "another service of the suite cannot be reached or is not ready"
# Codes that gRPC itself reports when a connection cannot be made, or breaks.
_BROKEN: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

# The gRPC code of each kind.
CODES: Final = MappingProxyType({kind: grpc.StatusCode[kind.value] for kind in Kind})

_KINDS: Final = {code: kind for kind, code in CODES.items()}
_KINDS_BY_NUMBER: Final = {code.value[0]: kind for kind, code in CODES.items()}


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PawlError) -> NoReturn:
    """End the RPC with the code of `error` and its google.rpc.ErrorInfo.

    Raises:
        grpc.aio.AbortError: Always. Let it propagate.
    """
    code = CODES[error.kind]
    message = shortened(error.message, _MESSAGE_BYTES_MAX)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={key: shortened(value, _METADATA_BYTES_MAX) for key, value in error.metadata.items()},
    )
    detail = AnyMessage()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    trailing = (*(context.trailing_metadata() or ()), (_DETAILS_KEY, status.SerializeToString()))
    await context.abort(code, message, trailing)


def from_rpc_error(error: grpc.aio.AioRpcError) -> PawlError:
    """Return the error that the peer raised or, if it has no reason, the error for its gRPC code.

    An unreachable peer becomes DependencyUnavailable with our own message. gRPC's message contains addresses, so it is
    only added as a note for logs. If this version does not know the reason, the error has the same kind and the unknown
    reason. An INTERNAL from a peer has the peer's error id. An INTERNAL from gRPC itself means that the connection
    broke.
    """
    message = error.details() or error.code().name
    info = _error_info(error)
    if info is not None:
        return _restored(_KINDS.get(error.code(), Kind.INTERNAL), message, info.reason, info.metadata)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC itself reports this code for a message over the limit of either end.
        return TooLarge() if "larger than max" in message else Overloaded()
    if error.code() in _BROKEN:
        unreachable = DependencyUnavailable(_UNREACHABLE)
        unreachable.add_note(f"{error.code().name}: {message}")
        return unreachable
    return by_kind[_KINDS.get(error.code(), Kind.INTERNAL)]()


def of_peer(error: PawlError) -> PawlError:
    """Return the error to raise for an error from a peer.

    A missed deadline becomes DependencyUnavailable, because this process set the deadline. The caller's own deadline
    may be later.
    """
    if isinstance(error, DeadlineExceeded):
        return DependencyUnavailable("another service of the suite did not answer in time")
    return error


def failure(error: PawlError) -> batch_pb2.Failure:
    return batch_pb2.Failure(
        code=CODES[error.kind].value[0], reason=error.reason, message=error.message, metadata=error.metadata
    )


def from_failure(failure: batch_pb2.Failure) -> PawlError:
    kind = _KINDS_BY_NUMBER.get(failure.code, Kind.INTERNAL)
    return _restored(kind, failure.message, failure.reason, failure.metadata)


def _restored(kind: Kind, message: str, reason: str, metadata: Mapping[str, str]) -> PawlError:
    return (by_reason.get(reason) or by_kind[kind]).restore(message, reason, metadata)


def has_reason(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a service sent the error. Errors from gRPC itself, such as a lost connection, have no reason."""
    return any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        info = error_details_pb2.ErrorInfo()
        try:
            for detail in status_pb2.Status.FromString(value).details:
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return info
        except DecodeError:
            return None
    return None
