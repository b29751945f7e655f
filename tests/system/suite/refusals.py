"""The status and reason of a failed call, as a client without generated stubs sees them."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Refusal:
    code: grpc.StatusCode
    reason: str = ""


TAKEN = Refusal(grpc.StatusCode.OK)


async def outcome(call: Awaitable[object]) -> Refusal:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        refused = error
    else:
        return TAKEN
    info = error_details_pb2.ErrorInfo()
    for key, value in refused.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(info)
    assert info.domain in {"pawl", ""}
    assert "Traceback" not in (refused.details() or "")
    return Refusal(refused.code(), info.reason)
