"""A registry that is older than its callers refuses what it does not know by name, and never with INTERNAL (OPS-4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2, source_pb2, tool_pb2, worker_pb2
from tests.fakes.unknown_values import BROKEN, calls_by_method, code_of
from tests.rpc.tool_registry.registry import SERVICE_KEY, Registry, running

FILES = (audit_pb2, execution_pb2, rule_pb2, source_pb2, tool_pb2, worker_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
METHODS = {method.name: method for service in SERVICES for method in service.methods}
CALLS = calls_by_method(*SERVICES)
KEY_OF = {"ExecutionService": SERVICE_KEY, "WorkerService": "key-of-machine-of-acme"}
ADMIN = "key-of-root-of-acme"


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, []) as registry:
        yield registry


def answer_to(channel: grpc.aio.Channel, method: MethodDescriptor, request: Any) -> Any:
    """Call a method of any kind with one request."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    read = message_factory.GetMessageClass(method.output_type).FromString
    if not method.client_streaming:
        call = channel.unary_stream if method.server_streaming else channel.unary_unary
        return call(name, type(request).SerializeToString, read)(request)
    return channel.stream_stream(name, type(request).SerializeToString, read)(iter([request]))


@pytest.mark.parametrize("method", sorted(CALLS))
async def test_a_value_that_is_unknown_is_refused_or_carried(registry: Registry, method: str) -> None:
    descriptor = METHODS[method]
    key = KEY_OF.get(descriptor.containing_service.name, ADMIN)
    ended: dict[str, grpc.StatusCode] = {}
    async with open_channel(registry.address, service_key=key) as channel:
        for field, request in CALLS[method]:
            ended[field] = await code_of(answer_to(channel, descriptor, request))
    assert {field: code for field, code in ended.items() if code in BROKEN} == {}


def test_there_are_such_fields() -> None:
    assert CALLS.keys() == {
        "AddSource",
        "AttachWorker",
        "CheckCalls",
        "CheckOwnTools",
        "CreateRule",
        "ListAudit",
        "RecordDecisions",
        "RecordResults",
        "RegisterTool",
    }
