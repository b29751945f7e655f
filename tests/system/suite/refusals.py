"""What a client without any stubs sees: bytes out, a status with its reason back."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

METHODS = {
    "agent": "pawl.agent.v1.AgentService",
    "tool": "pawl.tool.v1.ToolService",
    "execution": "pawl.tool.v1.ExecutionService",
    "ledger": "pawl.job.v1.LedgerService",
    "notify": "pawl.notify.v1.NotifyService",
}
PROCESSES = {
    "agent": "agent-loop",
    "tool": "tool-registry",
    "execution": "tool-registry",
    "ledger": "job-store",
    "notify": "notifier",
}
SECONDS_MAX = 60.0

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Refusal:
    """How a call ended: OK and no reason, or the status and what its google.rpc.ErrorInfo says."""

    code: grpc.StatusCode
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


TAKEN = Refusal(grpc.StatusCode.OK)


async def outcome(call: Awaitable[object]) -> Refusal:
    """Wait for a call and return how it ended."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return read(error)
    return TAKEN


def read(error: grpc.aio.AioRpcError) -> Refusal:
    """Return what an error says; no reason if it carries no google.rpc.ErrorInfo of Pawl's."""
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(info)
    assert info.domain in {"pawl", ""}
    assert "Traceback" not in (error.details() or "")
    return Refusal(error.code(), info.reason, dict(info.metadata))


async def send(
    channel: grpc.aio.Channel, service: str, method: str, request: Message | bytes, metadata: Metadata = ()
) -> Refusal:
    """Call a unary method with whatever bytes."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(f"/{METHODS[service]}/{method}")
    return await outcome(call(data, metadata=metadata, timeout=SECONDS_MAX))


async def listen(channel: grpc.aio.Channel, service: str, method: str, request: Message | bytes) -> Refusal:
    """Call a method that streams its answers with whatever bytes, and read to its end."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    behaviour: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{METHODS[service]}/{method}")
    stream = behaviour(data, timeout=SECONDS_MAX)

    async def drain() -> None:
        async for _ in stream:
            pass

    return await outcome(drain())
