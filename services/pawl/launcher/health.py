"""The readiness of a service: it has said where it listens, and its health service says that it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_SECONDS = 2.0


def read_addresses(path: Path) -> dict[str, str] | None:
    """The addresses that a process wrote; None if it has not yet."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {str(protocol): str(address) for protocol, address in found.items()} if isinstance(found, dict) else None


async def is_serving(address: str) -> bool:
    """Asks the gRPC health service once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
