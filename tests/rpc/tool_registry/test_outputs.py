"""Answers in a form, checked by a real registry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tool.v1 import execution_pb2
from tests.rpc.tool_registry.registry import Registry, context, reason, running

SCHEMA = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 5}}, "required": ["count"]}
NUMBERS = {"oneOf": [{"not": {"minimum": least}} for least in range(50)]}
COSTLY = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/numbers"}] * 20}}},
    "$defs": {"numbers": NUMBERS},
}


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, []) as registry:
        yield registry


async def checked(registry: Registry, output: str | None, schema: object = SCHEMA) -> Any:
    asked = None if output is None else output.encode()
    request = execution_pb2.CheckOutputRequest(store_id="acme", schema_json=json.dumps(schema).encode(), output=asked)
    return await registry.execution.CheckOutput(request, timeout=60)


async def test_an_answer_fits_or_everything_that_is_wrong_is_said(registry: Registry) -> None:
    assert (await checked(registry, '{"count": 3}')).output_json == b'{"count":3}'
    wrong = await checked(registry, '{"count": 6}')
    assert wrong.output_json == b""
    assert wrong.faults[0].startswith("count: ")
    assert await checked(registry, None) == execution_pb2.CheckOutputResponse()


async def test_a_schema_that_cannot_be_used_is_refused_by_type(registry: Registry) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await checked(registry, None, {"type": "array"})
    assert reason(refused.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_SCHEMA")
    assert "the schema must" in (await checked(registry, "{}", {"type": "array"})).faults[0]


async def test_what_takes_long_to_check_is_a_fault_and_holds_up_nobody_else(registry: Registry) -> None:
    """Whoever wrote the schema, and whatever the model says."""
    checking = asyncio.ensure_future(checked(registry, json.dumps({"a": [-1] * 20_000}), COSTLY))
    listed = 0
    while not checking.done():
        await registry.execution.ResolveTools(execution_pb2.ResolveToolsRequest(context=context()))
        listed += 1
    assert "takes too long" in (await checking).faults[0]
    assert listed
