"""Who may call which method of the registry: asked for each method of the contract, so for new ones too."""

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


@tool
async def pay() -> str:
    """Pay."""
    return "paid"


def _methods(*modules: object) -> Iterator[MethodDescriptor]:
    for module in modules:
        for service in module.DESCRIPTOR.services_by_name.values():  # type: ignore[attr-defined]  # of every module
            yield from service.methods


FOR_USERS = list(_methods(audit_pb2, rule_pb2, source_pb2, tool_pb2, worker_pb2))
FOR_SERVICES = list(_methods(execution_pb2))


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, [pay]) as registry:
        yield registry


async def refused(registry: Registry, method: MethodDescriptor, key: str) -> str:
    """The reason with which an empty request is refused."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    async with open_channel(registry.address, service_key=key or None) as channel:
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
    return said or await refused(registry, method, key)


def _name(method: MethodDescriptor) -> str:
    return str(method.name)


@pytest.mark.parametrize("method", [*FOR_USERS, *FOR_SERVICES], ids=_name)
async def test_without_a_credential_nothing_is_answered(registry: Registry, method: MethodDescriptor) -> None:
    assert await refused(registry, method, "") == "UNAUTHENTICATED"


@pytest.mark.parametrize("method", FOR_USERS, ids=_name)
async def test_what_acts_for_a_user_is_not_for_the_key_of_the_services(
    registry: Registry, method: MethodDescriptor
) -> None:
    """It has no store and no user: everything would be done for nobody, or for all."""
    assert await refused(registry, method, SERVICE_KEY) in {"PERMISSION_DENIED", "INVALID_FIELD", "INVALID_SCHEMA"}


@pytest.mark.parametrize("method", FOR_SERVICES, ids=_name)
async def test_what_names_a_store_is_not_for_users(registry: Registry, method: MethodDescriptor) -> None:
    assert await refused(registry, method, "key-of-root-of-acme") == "PERMISSION_DENIED"
