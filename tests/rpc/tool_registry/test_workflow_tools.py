"""Workflows that agents call as tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tools import Category, EffectClass, tool
from tests.rpc.tool_registry.registry import REFUSE, Registry, context, front_end_tool, proposed, reason, running

SCHEMA = b'{"type":"object","properties":{"ticket":{"type":"integer"}},"required":["ticket"]}'


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look(n: int = 0) -> int:
    """Look."""
    return n


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [look]) as registry:
        yield registry


async def put(registry: Registry, name: str = "triage", **fields: Any) -> None:
    fields = {"description": "Sort a ticket.", "input_schema_json": SCHEMA, **fields}
    await registry.execution.PutWorkflowTool(execution_pb2.PutWorkflowToolRequest(store_id="acme", name=name, **fields))


async def remove(registry: Registry, name: str) -> None:
    await put(registry, name, description="", input_schema_json=b"")


async def names(registry: Registry, **who: Any) -> list[str]:
    request = execution_pb2.ResolveToolsRequest(context=context(**who))
    return [each.definition.name for each in (await registry.execution.ResolveTools(request)).tools]


async def test_a_call_of_a_workflow_is_checked_and_delegated(registry: Registry) -> None:
    await put(registry)
    await put(registry)
    call = proposed("a", "triage", b'{"ticket": 7}', tool_version=1)
    (verdict,) = await registry.verdicts(call)
    assert verdict.disposition == execution_pb2.DISPOSITION_DELEGATE
    assert verdict.context == call_pb2.EXECUTION_CONTEXT_AGENT
    (verdict,) = await registry.verdicts(proposed("b", "triage", b'{"ticket": "x"}', tool_version=1))
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
    assert "triage" not in await names(registry, store="other")


async def test_a_workflow_that_is_no_longer_a_tool_cannot_be_called(registry: Registry) -> None:
    await put(registry)
    await remove(registry, "triage")
    await remove(registry, "triage")
    assert "triage" not in await names(registry)
    (verdict,) = await registry.verdicts(proposed("a", "triage", b'{"ticket": 7}', tool_version=1))
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, "TOOL_NOT_FOUND")


async def test_a_workflow_never_takes_or_removes_another_tool(registry: Registry) -> None:
    await registry.users["acme", "ann"].RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    for validate_only in (True, False):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await put(registry, "look", validate_only=validate_only)
        assert reason(error.value)[1] == "TOOL_EXISTS"
    for name in ("look", "show_chart"):
        await remove(registry, name)
    assert await names(registry) == ["look", "show_chart"]


async def test_validation_registers_nothing(registry: Registry) -> None:
    await put(registry, validate_only=True)
    assert "triage" not in await names(registry)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await put(registry, input_schema_json=b'{"type": "nonsense"}', validate_only=True)
    assert reason(error.value)[1] == "INVALID_SCHEMA"
