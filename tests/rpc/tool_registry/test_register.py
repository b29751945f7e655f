"""Registered tools, their versions, and tools that come with a run or a workflow (TOOL-1, TOOL-2)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pawl.errors import InvalidSchema, PawlError, ToolExists, ToolNotFound
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool_registry.rules import registering
from pawl.tools import Category, EffectClass, Tool, tool
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import (
    APPROVE,
    FOR_ANN,
    OFFER,
    REFUSE,
    Registry,
    all_pages,
    content,
    context,
    front_end_tool,
    proposed,
    refusal,
    running,
)


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, allowed_users=["ann"])
def private() -> str:
    """Only for ann."""
    return "x"


@tool(name="add", category=Category.SAFE, effect=EffectClass.READ_ONLY)
def add_changed(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [add, private]) as registry:
        yield registry


def put(registry: Registry, user: str, *, replace: bool = False, store: str = "acme", **changes: Any) -> Any:
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool(**changes), replace=replace)
    return registry.users[store, user].RegisterTool(request)


def unregister(registry: Registry, user: str, name: str = "show_chart") -> Any:
    return registry.users["acme", user].UnregisterTool(tool_pb2.UnregisterToolRequest(name=name))


async def register(registry: Registry, **changes: Any) -> tool_pb2.Tool:
    found: tool_pb2.Tool = (await put(registry, "ann", **changes)).tool
    return found


async def resolve(registry: Registry, *names: str, pinned: dict[str, int] | None = None, **who: str) -> dict[str, int]:
    request = execution_pb2.ResolveToolsRequest(context=context(**who), tool_names=names, pinned_versions=pinned or {})
    return {tool.definition.name: tool.version for tool in (await registry.execution.ResolveTools(request)).tools}


async def test_unknown_name_is_rejected_with_a_suggestion(registry: Registry) -> None:
    assert (await raises(ToolNotFound, resolve(registry, "add", "ad"), match="'add'")).metadata == {"tool_name": "ad"}
    assert (await raises(ToolNotFound, resolve(registry, pinned={"add": 7}))).metadata == {"tool_name": "add"}


async def test_versions_of_loaded_tools_are_stable_across_restarts_and_replicas(
    database_url: str, tmp_path: Path
) -> None:
    async with running(database_url, tmp_path, [add]) as first:
        assert await resolve(first) == {"add": 1}
        async with running(database_url, tmp_path, [add_changed], name="b") as newer:
            assert (await resolve(newer), await resolve(newer, pinned={"add": 1})) == ({"add": 2}, {"add": 1})
            assert await resolve(first) == {"add": 1}
    async with running(database_url, tmp_path, [add, add_changed]) as restarted:
        # Both tools have this name, so the second is skipped and logged.
        assert await resolve(restarted) == {"add": 1}


async def test_run_continues_without_a_tool_that_is_no_longer_loaded(database_url: str, tmp_path: Path) -> None:
    """TOOL-1: only calls of that tool are rejected."""

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    def invite(names: str) -> str:
        """Invite people."""
        return names

    async with running(database_url, tmp_path, [add, invite]) as registry:
        assert await resolve(registry) == {"add": 1, "invite": 1}
    async with running(database_url, tmp_path, [add]) as registry:
        assert await resolve(registry) == {"add": 1}
        assert await resolve(registry, pinned={"add": 1, "invite": 1}) == {"add": 1, "invite": 1}
        verdict = await registry.check("invite", {"names": "a"})
        assert (verdict.disposition, verdict.error_reason) == (execution_pb2.DISPOSITION_REFUSE, "TOOL_NOT_FOUND")


async def test_registered_tool_is_available_only_to_its_stores_runs(registry: Registry) -> None:
    """TOOL-2: fields that a definition omits get the cautious default."""
    made = await register(registry, category=0, effect_class=0)
    assert (made.version, made.source, made.create_time.seconds > 0) == (1, "store", True)
    assert (made.definition.category, made.definition.effect_class) == (2, 4)
    assert await resolve(registry) == {"add": 1, "private": 1, "show_chart": 1}
    assert await resolve(registry, store="other") == {"add": 1, "private": 1}
    for name in ("show_chart", "show_charts"):
        foreign = registry.users["other", "ann"].GetTool(tool_pb2.GetToolRequest(name=name))
        assert await refusal(foreign) == "TOOL_NOT_FOUND"


async def test_a_changed_definition_gets_a_new_version_while_runs_keep_theirs(registry: Registry) -> None:
    """TOOL-1: concurrent registrations create each version once."""
    entries = await asyncio.gather(*(register(registry) for _ in range(8)))
    assert {entry.version for entry in entries} == {1}, "the same definition is one version"
    assert await register(registry, replace=True) == entries[0]
    assert await refusal(put(registry, "ann", description="Other.")) == "TOOL_EXISTS"
    kinds = await asyncio.gather(*(register(registry, replace=True, description=f"Variant {n}.") for n in range(8)))
    assert sorted(entry.version for entry in kinds) == list(range(2, 10))
    assert await resolve(registry, "show_chart") == {"show_chart": 9}
    assert await resolve(registry, "show_chart", pinned={"show_chart": 1}) == {"show_chart": 1}
    await unregister(registry, "ann")
    assert await resolve(registry) == {"add": 1, "private": 1}, "it is gone for new runs"
    assert await resolve(registry, "add", "show_chart", pinned={"show_chart": 1}) == {"add": 1, "show_chart": 1}
    assert await resolve(registry, pinned={"show_chart": 1}) == {"add": 1, "private": 1, "show_chart": 1}
    old = await registry.ann.GetTool(tool_pb2.GetToolRequest(name="show_chart", version=1))
    assert old.tool.definition.description == "Show a chart."
    assert await refusal(registry.ann.GetTool(tool_pb2.GetToolRequest(name="show_chart"))) == "TOOL_NOT_FOUND"
    assert await refusal(unregister(registry, "ann")) == "TOOL_NOT_FOUND"
    assert (await register(registry, description="Again.")).version == 10


async def test_pages_list_every_tool_once_in_name_order(registry: Registry) -> None:
    for number in range(5):
        await register(registry, name=f"tool_{number}")
    found = await all_pages(registry.ann.ListTools, tool_pb2.ListToolsRequest(page_size=2), "tools")
    assert [entry.definition.name for entry in found] == ["add", "private", *(f"tool_{number}" for number in range(5))]


async def test_invalid_definition_is_rejected(registry: Registry) -> None:
    schemas = [
        b"",
        b"[]",
        b'{"type": "object", "type": "object"}',
        b'{"type": "object", "$ref": "http://example.com/"}',
        b'{"type": "object", "properties": {"a": {"$ref": "#"}}}',
        b'{"type": "object", "required": ["a"], "$ref": "#/required/%s"}' % (b"9" * 5000),
        b" " * 70_000,
    ]
    not_properties = b'{"type": "object", "properties": 5}'
    rows: list[tuple[dict[str, Any], str, str | None]] = [
        ({"name": "a b"}, "INVALID_FIELD", "name"),
        ({"context": 1}, "INVALID_FIELD", "context"),
        ({"context": 0}, "INVALID_FIELD", "context"),
        ({"category": 99}, "INVALID_FIELD", "category"),
        ({"effect_class": 99}, "INVALID_FIELD", "effect_class"),
        ({"timeout_seconds": -1.0}, "INVALID_FIELD", "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "INVALID_FIELD", "timeout_seconds"),
        ({"description": "a\0b"}, "INVALID_FIELD", "description"),
        ({"resource_keys": ["a\0b"]}, "INVALID_FIELD", "resource_keys"),
        ({"arguments_schema_json": not_properties, "resource_keys": ["a:{a}"]}, "INVALID_FIELD", "resource_keys"),
        ({"offer_fallback": 2, "fallback_tool_name": "nope"}, "INVALID_FIELD", "fallback_tool_name"),
        ({"offer_fallback": 2, "fallback_tool_name": "show_chart"}, "INVALID_FIELD", "fallback_tool_name"),
        *(({"arguments_schema_json": schema}, "INVALID_SCHEMA", None) for schema in schemas),
    ]
    for changes, why, field in rows:
        error = await raises(PawlError, put(registry, "ann", **changes))
        assert (error.reason, error.metadata.get("field")) == (why, field), changes
    for field in ("store_id", "user_id"):
        who = context(**{field: "a/b"})
        assert await refusal(registry.execution.ResolveTools(execution_pb2.ResolveToolsRequest(context=who))) == (
            "INVALID_ID"
        )


async def test_only_an_admin_relaxes_or_removes_a_restricted_front_end_tool(registry: Registry) -> None:
    """C6: a user who may not approve must not be able to remove the gate."""
    denied = "PERMISSION_DENIED"
    gated: dict[str, Any] = {
        "category": 2,
        "effect_class": 4,
        "approvals_required": 2,
        "allowed_user_ids": ["ann"],
    }
    await put(registry, "ann", **gated)
    less: tuple[dict[str, Any], ...] = (
        {"category": 1},
        {"approvals_required": 1},
        {"effect_class": 1},
        {"allowed_user_ids": []},
        {"allowed_user_ids": ["ann", "bob"]},
    )
    for laxer in less:
        assert await refusal(put(registry, "ann", replace=True, **gated | laxer)) == denied, laxer
    assert await refusal(unregister(registry, "ann")) == denied
    free = tool_pb2.RegisterToolRequest(definition=front_end_tool(), replace=True)
    assert await refusal(registry.users["acme", "shop"].RegisterTool(free, metadata=FOR_ANN)) == denied
    await put(registry, "ann", replace=True, **gated | {"category": 3, "approvals_required": 3})
    await unregister(registry, "root")
    assert await refusal(put(registry, "mel")) == denied, "a removed name does not return with fewer restrictions"
    await put(registry, "root")
    assert await refusal(put(registry, "mel", replace=True, description="Changed.")) == denied
    assert await refusal(unregister(registry, "mel")) == denied
    await put(registry, "mel")  # Unchanged
    await unregister(registry, "root")
    await put(registry, "mel", description="Changed.")
    assert await refusal(unregister(registry, "max")) == denied
    await unregister(registry, "mel")


async def test_front_end_tools_are_limited_per_user_and_per_store(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering, "QUOTAS", {"store": (2, 4)})
    for user, name, why in (
        ("mel", "one", ""),
        ("mel", "two", ""),
        ("mel", "three", "INVALID_FIELD"),
        ("mel", "two", ""),  # It exists
        ("max", "three", ""),
        ("root", "four", ""),
        ("root", "five", "INVALID_FIELD"),
    ):
        added = put(registry, user, name=name)
        assert (await refusal(added) if why else bool(await added)) == (why or True), (user, name)
    await unregister(registry, "mel", "one")
    await put(registry, "mel", name="one")


async def test_tool_limit_never_drops_tools_in_favour_of_other_users_tools(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tools that a member registers cannot fail the runs of other users or displace their tools."""

    async def taken(user: str, most: int, *names: str) -> tuple[list[str], int]:
        request = execution_pb2.ResolveToolsRequest(context=context(user=user), tool_names=names, tools_max=most)
        answer = await registry.execution.ResolveTools(request)
        return [each.definition.name for each in answer.tools], answer.left_out_count

    for user, name in (("mel", "mel_1"), ("max", "a_max_1"), ("mel", "mel_2"), ("max", "a_max_2")):
        await put(registry, user, name=name)
    assert await taken("mel", 3) == (["add", "mel_1", "mel_2"], 2)
    assert await taken("max", 4) == (["a_max_1", "a_max_2", "add", "mel_1"], 1)
    assert await taken("max", 5) == (["a_max_1", "a_max_2", "add", "mel_1", "mel_2"], 0)
    assert await taken("max", 2, "mel_2", "add", "a_max_1") == (["add", "mel_2"], 1)
    monkeypatch.setattr(registering, "TOOLS_BYTES_MAX", 1000)
    await put(registry, "mel", name="large", description="x" * 900)
    assert (await taken("mel", 128))[1] > 0, "and their total size is within the limit"


async def test_tools_that_are_loaded_again_replace_those_of_their_source(database_url: str, tmp_path: Path) -> None:
    """A running call ends with its own function, and a pinned version runs the new one."""
    started, may_end = asyncio.Event(), asyncio.Event()

    def made(answer: str, **options: Any) -> Tool[..., Any]:
        async def stock(item: str) -> str:
            """Look up the stock."""
            if item == "slow":
                started.set()
                await may_end.wait()
            return answer

        return tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, **options)(stock)

    gone = tool(name="gone", category=Category.SAFE)(made("gone").function)
    async with running(database_url, tmp_path, [made("old"), gone]) as registry:
        slow = asyncio.create_task(registry.run("stock", {"item": "slow"}, call="slow"))
        await started.wait()
        registry.catalog.forget("module:other")
        assert registry.catalog.loaded_names == ["gone", "stock"]
        for version in (2, 3):
            registry.catalog.forget("module:")
            await registry.catalog.load("module:test", [made(f"new {version}", timeout_seconds=float(version))])
            for pinned in range(1, version + 1):
                ran = await registry.run("stock", {"item": "mug"}, call=f"c{version}{pinned}", version=pinned)
                assert content(ran) == f"new {version}"
        assert registry.catalog.loaded_names == ["stock"]
        may_end.set()
        assert content(await slow) == "old"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look(n: int = 0) -> int:
    """Look."""
    return n


@tool(name="private", category=Category.SAFE, effect=EffectClass.READ_ONLY, allowed_users=["bob"])
def private_of_bob() -> str:
    """Only for bob."""
    return ""


@pytest.fixture
async def own_registry(database_url: str, tmp_path: Path) -> Any:
    async with running(database_url, tmp_path, [look, private_of_bob]) as own_registry:
        yield own_registry


async def checked(own_registry: Registry, *definitions: tool_pb2.ToolDefinition) -> list[tool_pb2.OwnTool]:
    request = execution_pb2.CheckOwnToolsRequest(context=context(), definitions=definitions)
    return list((await own_registry.execution.CheckOwnTools(request)).tools)


async def refused(own_registry: Registry, *definitions: tool_pb2.ToolDefinition) -> tuple[str, str]:
    error = await raises(PawlError, checked(own_registry, *definitions))
    return error.reason, error.message


async def judge(
    own_registry: Registry, own: tool_pb2.OwnTool, arguments: bytes = b"{}", *, call: str = "call", name: str = ""
) -> execution_pb2.Verdict:
    (verdict,) = await own_registry.verdicts(proposed(call, name or own.definition.name, arguments, own_tool=own))
    return verdict


async def test_run_tools_are_not_stored_but_have_stable_digests(own_registry: Registry) -> None:
    first, second = await checked(own_registry, front_end_tool("a"), front_end_tool("b", context=0))
    assert first.definition.context == second.definition.context == call_pb2.EXECUTION_CONTEXT_FRONTEND
    assert len({first.definition_sha256, second.definition_sha256}) == 2
    assert (await checked(own_registry, first.definition))[0].definition_sha256 == first.definition_sha256
    listed = (await own_registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    assert {entry.definition.name for entry in listed} == {"look"}


async def test_run_tools_are_checked_like_registered_ones(own_registry: Registry) -> None:
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
        found, sentence = await refused(
            own_registry, front_end_tool("fine"), front_end_tool(**({"name": "x"} | changes))
        )
        assert (found, said in sentence) == (why, True), changes


async def test_a_registered_tool_keeps_its_name_unless_the_definitions_are_identical(own_registry: Registry) -> None:
    root = own_registry.users["acme", "root"]
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    why, said = await refused(own_registry, front_end_tool(description="Another."))
    assert (why, "rename the one sent with this run" in said) == ("TOOL_EXISTS", True)
    for_bob = front_end_tool("chart_of_bob", allowed_user_ids=["bob"])
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=for_bob))
    await checked(own_registry, front_end_tool(), front_end_tool("chart_of_bob"))


async def test_call_is_checked_against_its_runs_definition(own_registry: Registry) -> None:
    closed = b'{"type":"object","properties":{"points":{"type":"array"}},"additionalProperties":false}'
    (own,) = await checked(own_registry, front_end_tool("show_map", timeout_seconds=5, arguments_schema_json=closed))
    verdict = await judge(own_registry, own, b'{"points":"1"}')
    assert (verdict.disposition, verdict.context) == (OFFER, call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert (verdict.arguments_json, verdict.tool_version, verdict.timeout_seconds) == (b'{"points":["1"]}', 1, 5.0)
    wrong = await judge(own_registry, own, b'{"pionts":[1]}')
    assert (wrong.disposition, wrong.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
    (other,) = await checked(own_registry, front_end_tool("show_list", category=3, effect_class=4))
    asked = await judge(own_registry, other)
    assert (asked.disposition, asked.approval_cause, len(asked.digest)) == (APPROVE, "category DESTRUCTIVE", 64)
    await raises(PawlError, judge(own_registry, own, name="look"), match="must have the name of the call")


SCHEMA = b'{"type":"object","properties":{"ticket":{"type":"integer"}},"required":["ticket"]}'


async def put_workflow(own_registry: Registry, name: str = "triage", **fields: Any) -> None:
    fields = {"description": "Sort a ticket.", "input_schema_json": SCHEMA, **fields}
    await own_registry.execution.PutWorkflowTool(
        execution_pb2.PutWorkflowToolRequest(store_id="acme", name=name, **fields)
    )


async def remove(own_registry: Registry, name: str) -> None:
    await put_workflow(own_registry, name, description="", input_schema_json=b"")


async def names(own_registry: Registry, **who: Any) -> list[str]:
    request = execution_pb2.ResolveToolsRequest(context=context(**who))
    return [each.definition.name for each in (await own_registry.execution.ResolveTools(request)).tools]


async def test_a_call_of_a_workflow_is_checked_and_delegated(own_registry: Registry) -> None:
    for _ in range(2):
        await put_workflow(own_registry)
    (verdict,) = await own_registry.verdicts(proposed("a", "triage", b'{"ticket": 7}', tool_version=1))
    assert verdict.disposition == execution_pb2.DISPOSITION_DELEGATE
    assert verdict.context == call_pb2.EXECUTION_CONTEXT_AGENT
    (verdict,) = await own_registry.verdicts(proposed("b", "triage", b'{"ticket": "x"}', tool_version=1))
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
    assert "triage" not in await names(own_registry, store="other")


async def test_a_workflow_that_is_no_longer_a_tool_cannot_be_called(own_registry: Registry) -> None:
    await put_workflow(own_registry)
    await remove(own_registry, "triage")
    await remove(own_registry, "triage")
    assert "triage" not in await names(own_registry)
    (verdict,) = await own_registry.verdicts(proposed("a", "triage", b'{"ticket": 7}', tool_version=1))
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, "TOOL_NOT_FOUND")


async def test_a_workflow_never_takes_or_removes_another_tool(own_registry: Registry) -> None:
    await own_registry.users["acme", "ann"].RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    await raises(ToolExists, *(put_workflow(own_registry, "look", validate_only=each) for each in (True, False)))
    for name in ("look", "show_chart"):
        await remove(own_registry, name)
    assert await names(own_registry) == ["look", "show_chart"]


async def test_validation_registers_nothing(own_registry: Registry) -> None:
    await put_workflow(own_registry, validate_only=True)
    assert "triage" not in await names(own_registry)
    await raises(
        InvalidSchema, put_workflow(own_registry, input_schema_json=b'{"type": "nonsense"}', validate_only=True)
    )
