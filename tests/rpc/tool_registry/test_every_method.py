"""Asked for each method of the contract, so for new ones too: who may call it, and what values it knows (OPS-4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor

from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2, source_pb2, tool_pb2, worker_pb2
from pawl.tools import tool
from tests.rpc.tool_registry.registry import SERVICE_KEY, Registry, reason, running

FILES = (audit_pb2, rule_pb2, source_pb2, tool_pb2, worker_pb2, execution_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
ADMIN = "key-of-root-of-acme"


@tool
async def pay() -> str:
    """Pay."""
    return "paid"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, [pay]) as registry:
        yield registry


def methods() -> Iterator[tuple[MethodDescriptor, bool]]:
    """Each method, and whether it is for services only."""
    for service in SERVICES:
        for method in service.methods:
            yield method, service.name == "ExecutionService"


async def refused(channel: grpc.aio.Channel, method: MethodDescriptor) -> str:
    """The reason with which an empty request is refused."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    behaviour: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    stream = behaviour(timeout=60.0)
    try:
        # A stream that was refused by now takes no request.
        with suppress(asyncio.InvalidStateError, grpc.aio.UsageError):
            await stream.write(b"")
            await stream.done_writing()
        await stream.read()
        await stream.read()
    except grpc.aio.AioRpcError as error:
        said = reason(error)[1]
    else:
        return ""
    finally:
        stream.cancel()
    # gRPC has an error of its own for a write that was under way when the refusal came.
    return said or await refused(channel, method)


async def test_each_method_is_for_users_or_for_services_and_needs_a_credential(registry: Registry) -> None:
    """A service has no store and no user: everything would be done for nobody, or for all."""
    for key in ("", SERVICE_KEY, ADMIN):
        async with open_channel(registry.address, service_key=key or None) as channel:
            for method, is_for_services in methods():
                if key == "":
                    assert await refused(channel, method) == "UNAUTHENTICATED", method.name
                elif key == SERVICE_KEY and not is_for_services:
                    expected = {"PERMISSION_DENIED", "INVALID_FIELD", "INVALID_SCHEMA"}
                    assert await refused(channel, method) in expected, method.name
                elif key == ADMIN and is_for_services:
                    assert await refused(channel, method) == "PERMISSION_DENIED", method.name
