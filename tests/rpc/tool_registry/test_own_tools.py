"""Front-end tools that come with a run, and workflows that agents call as tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tools import Category, EffectClass, tool
from tests.rpc.tool_registry.registry import (
    APPROVE,
    OFFER,
    REFUSE,
    Registry,
    context,
    front_end_tool,
    proposed,
    reason,
    running,
)


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look(n: int = 0) -> int:
    """Look."""
    return n


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, allowed_users=["bob"])
def private() -> str:
    """Only for bob."""
    return ""


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [look, private]) as registry:
        yield registry


async def checked(registry: Registry, *definitions: tool_pb2.ToolDefinition) -> list[tool_pb2.OwnTool]:
    request = execution_pb2.CheckOwnToolsRequest(context=context(), definitions=definitions)
    return list((await registry.execution.CheckOwnTools(request)).tools)


async def refused(registry: Registry, *definitions: tool_pb2.ToolDefinition) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await checked(registry, *definitions)
    return reason(error.value)[1], error.value.details() or ""


async def judge(
    registry: Registry, own: tool_pb2.OwnTool, arguments: bytes = b"{}", *, call: str = "call", name: str = ""
) -> execution_pb2.Verdict:
    (verdict,) = await registry.verdicts(proposed(call, name or own.definition.name, arguments, own_tool=own))
    return verdict


async def test_run_tools_are_not_stored_but_have_stable_digests(registry: Registry) -> None:
    first, second = await checked(registry, front_end_tool("a"), front_end_tool("b", context=0))
    assert first.definition.context == second.definition.context == call_pb2.EXECUTION_CONTEXT_FRONTEND
    assert len({first.definition_sha256, second.definition_sha256}) == 2
    assert (await checked(registry, first.definition))[0].definition_sha256 == first.definition_sha256
    listed = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    assert {entry.definition.name for entry in listed} == {"look"}


async def test_run_tools_are_checked_like_registered_ones(registry: Registry) -> None:
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"name": "look"}, "TOOL_EXISTS", "cannot be replaced"),
        ({"name": "private"}, "TOOL_EXISTS", "cannot be replaced"),
        ({"name": "a.b"}, "INVALID_FIELD", "a dot"),
        ({"context": 1}, "INVALID_FIELD", "FRONTEND"),
        ({"arguments_schema_json": b'{"type":"object","properties":3}'}, "INVALID_SCHEMA", ""),
        ({"timeout_seconds": -1}, "INVALID_FIELD", "timeout_seconds"),
        ({"offer_fallback": 2, "fallback_tool_name": "absent"}, "INVALID_FIELD", "backend tool"),
        ({"allowed_roles": ["admin"]}, "INVALID_FIELD", "remove allowed_user_ids"),
    ]
    for changes, why, said in rows:
        found, sentence = await refused(registry, front_end_tool("fine"), front_end_tool(**({"name": "x"} | changes)))
        assert (found, said in sentence) == (why, True), changes


async def test_a_registered_tool_keeps_its_name_unless_the_definitions_are_identical(registry: Registry) -> None:
    root = registry.users["acme", "root"]
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    why, said = await refused(registry, front_end_tool(description="Another."))
    assert (why, "rename the one sent with this run" in said) == ("TOOL_EXISTS", True)
    for_bob = front_end_tool("chart_of_bob", allowed_user_ids=["bob"])
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=for_bob))
    await checked(registry, front_end_tool(), front_end_tool("chart_of_bob"))


async def test_call_is_checked_against_its_runs_definition(registry: Registry) -> None:
    closed = b'{"type":"object","properties":{"points":{"type":"array"}},"additionalProperties":false}'
    (own,) = await checked(registry, front_end_tool("show_map", timeout_seconds=5, arguments_schema_json=closed))
    verdict = await judge(registry, own, b'{"points":"1"}')
    assert (verdict.disposition, verdict.context) == (OFFER, call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert (verdict.arguments_json, verdict.tool_version, verdict.timeout_seconds) == (b'{"points":["1"]}', 1, 5.0)
    wrong = await judge(registry, own, b'{"pionts":[1]}')
    assert (wrong.disposition, wrong.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
    (other,) = await checked(registry, front_end_tool("show_list", category=3, effect_class=4))
    asked = await judge(registry, other)
    assert (asked.disposition, asked.approval_cause, len(asked.digest)) == (APPROVE, "category DESTRUCTIVE", 64)
    with pytest.raises(grpc.aio.AioRpcError, match="must have the name of the call"):
        await judge(registry, own, name="look")


SCHEMA = b'{"type":"object","properties":{"ticket":{"type":"integer"}},"required":["ticket"]}'


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
