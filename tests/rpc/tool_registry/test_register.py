"""The register: tools of the deployment and of stores, their versions. TOOL-1, TOOL-2."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from pawl.tool.v1.tool_pb2_grpc import ToolServiceStub
from pawl.tool_registry.domain import registering
from pawl.tools import Category, EffectClass, tool
from tests.rpc.tool_registry.registry import FOR_ANN, SERVICE_KEY, Registry, context, front_end_tool, reason, running


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


async def register(registry: Registry, *, replace: bool = False, **changes: Any) -> tool_pb2.Tool:
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool(**changes), replace=replace)
    return (await registry.ann.RegisterTool(request)).tool


async def resolve(registry: Registry, *names: str, pinned: dict[str, int] | None = None, **who: str) -> dict[str, int]:
    request = execution_pb2.ResolveToolsRequest(context=context(**who), tool_names=names, pinned_versions=pinned or {})
    return {tool.definition.name: tool.version for tool in (await registry.execution.ResolveTools(request)).tools}


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    code, why, _ = reason(error.value)
    return code, why


async def test_a_registered_tool_is_given_to_runs_of_its_store_and_of_no_other(registry: Registry) -> None:
    made = await register(registry)
    assert (made.version, made.source) == (1, "store")
    assert made.create_time.seconds > 0
    assert await resolve(registry) == {"add": 1, "private": 1, "show_chart": 1}
    assert await resolve(registry, store="other") == {"add": 1, "private": 1}
    foreign = await refusal(registry.users["other", "ann"].GetTool(tool_pb2.GetToolRequest(name="show_chart")))
    absent = await refusal(registry.users["other", "ann"].GetTool(tool_pb2.GetToolRequest(name="show_charts")))
    assert foreign == absent == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")


async def test_the_same_definition_again_changes_nothing(registry: Registry) -> None:
    first = await register(registry)
    assert await register(registry) == first
    assert await register(registry, replace=True) == first


async def test_another_definition_under_the_name_needs_to_be_meant(registry: Registry) -> None:
    await register(registry)
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool(description="Other."))
    assert await refusal(registry.ann.RegisterTool(request)) == (grpc.StatusCode.ALREADY_EXISTS, "TOOL_EXISTS")
    assert (await register(registry, replace=True, description="Other.")).version == 2


async def test_registered_at_once_by_many_a_tool_gets_one_version(registry: Registry) -> None:
    versions = await asyncio.gather(*(register(registry) for _ in range(8)))
    assert {entry.version for entry in versions} == {1}
    kinds = await asyncio.gather(
        *(register(registry, replace=True, description=f"Variant {number}.") for number in range(8))
    )
    assert sorted(entry.version for entry in kinds) == list(range(2, 10))


async def test_a_run_keeps_the_version_that_it_started_with(registry: Registry) -> None:
    """TOOL-1."""
    await register(registry)
    await register(registry, replace=True, description="Other.")
    assert await resolve(registry, "show_chart") == {"show_chart": 2}
    assert await resolve(registry, "show_chart", pinned={"show_chart": 1}) == {"show_chart": 1}
    await registry.ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))
    assert await resolve(registry, "add", "show_chart", pinned={"show_chart": 1}) == {"add": 1, "show_chart": 1}
    assert await resolve(registry, pinned={"show_chart": 1}) == {"add": 1, "private": 1, "show_chart": 1}
    old = await registry.ann.GetTool(tool_pb2.GetToolRequest(name="show_chart", version=1))
    assert old.tool.definition.description == "Show a chart."


async def test_an_unregistered_tool_is_gone_for_new_runs(registry: Registry) -> None:
    await register(registry)
    await registry.ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))
    assert await resolve(registry) == {"add": 1, "private": 1}
    gone = (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")
    assert await refusal(registry.ann.GetTool(tool_pb2.GetToolRequest(name="show_chart"))) == gone
    assert await refusal(registry.ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))) == gone
    assert (await register(registry, description="Again.")).version == 2


async def test_tools_of_the_deployment_can_be_neither_replaced_nor_unregistered(registry: Registry) -> None:
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool("add"), replace=True)
    assert await refusal(registry.ann.RegisterTool(request)) == (grpc.StatusCode.ALREADY_EXISTS, "TOOL_EXISTS")
    taken_out = registry.ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name="add"))
    assert await refusal(taken_out) == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")


async def test_a_name_that_does_not_exist_is_refused_with_its_near_match(registry: Registry) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await resolve(registry, "add", "ad")
    assert reason(error.value) == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND", {"tool_name": "ad"})
    assert "'add'" in (error.value.details() or "")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await resolve(registry, pinned={"add": 7})
    assert reason(error.value)[1:] == ("TOOL_NOT_FOUND", {"tool_name": "add"})


async def test_a_tool_is_seen_only_by_those_who_may_call_it(registry: Registry) -> None:
    """TOOL-6."""
    assert await resolve(registry, user="bob") == {"add": 1}
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await resolve(registry, "private", user="bob")
    assert reason(error.value)[1] == "TOOL_NOT_FOUND"
    listed = await registry.users["acme", "bob"].ListTools(tool_pb2.ListToolsRequest())
    assert [entry.definition.name for entry in listed.tools] == ["add"]
    hidden = registry.users["acme", "bob"].GetTool(tool_pb2.GetToolRequest(name="private"))
    assert await refusal(hidden) == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")


async def test_pages_hold_every_tool_once_in_order_of_names(registry: Registry) -> None:
    for number in range(5):
        await register(registry, name=f"tool_{number}")
    names: list[str] = []
    token = ""
    while True:
        page = await registry.ann.ListTools(tool_pb2.ListToolsRequest(page_size=2, page_token=token))
        assert len(page.tools) <= 2
        names += [entry.definition.name for entry in page.tools]
        token = page.next_page_token
        if not token:
            break
    assert names == ["add", "private", *(f"tool_{number}" for number in range(5))]


@pytest.mark.parametrize("token", ["x", "!!", "bm90IG91cnM="])
async def test_a_token_of_another_making_is_refused(registry: Registry, token: str) -> None:
    listed = registry.ann.ListTools(tool_pb2.ListToolsRequest(page_token=token))
    assert await refusal(listed) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PAGE_TOKEN")


@pytest.mark.parametrize(
    ("changes", "why", "field"),
    [
        ({"name": "a b"}, "INVALID_FIELD", "name"),
        ({"context": 1}, "INVALID_FIELD", "context"),
        ({"context": 0}, "INVALID_FIELD", "context"),
        ({"category": 99}, "INVALID_FIELD", "category"),
        ({"effect_class": 99}, "INVALID_FIELD", "effect_class"),
        ({"timeout_seconds": -1.0}, "INVALID_FIELD", "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "INVALID_FIELD", "timeout_seconds"),
        ({"description": "a\0b"}, "INVALID_FIELD", "description"),
        ({"resource_keys": ["a\0b"]}, "INVALID_FIELD", "resource_keys"),
        (
            {"arguments_schema_json": b'{"type": "object", "properties": 5}', "resource_keys": ["a:{a}"]},
            "INVALID_FIELD",
            "resource_keys",
        ),
        ({"offer_fallback": 2, "fallback_tool_name": "nope"}, "INVALID_FIELD", "fallback_tool_name"),
        ({"offer_fallback": 2, "fallback_tool_name": "show_chart"}, "INVALID_FIELD", "fallback_tool_name"),
        ({"arguments_schema_json": b""}, "INVALID_SCHEMA", None),
        ({"arguments_schema_json": b"[]"}, "INVALID_SCHEMA", None),
        ({"arguments_schema_json": b'{"type": "object", "type": "object"}'}, "INVALID_SCHEMA", None),
        ({"arguments_schema_json": b'{"type": "object", "$ref": "http://example.com/"}'}, "INVALID_SCHEMA", None),
        ({"arguments_schema_json": b'{"type": "object", "properties": {"a": {"$ref": "#"}}}'}, "INVALID_SCHEMA", None),
        (
            {
                "arguments_schema_json": b'{"type": "object", "required": ["a"], "$ref": "#/required/%s"}'
                % (b"9" * 5000)
            },
            "INVALID_SCHEMA",
            None,
        ),
        ({"arguments_schema_json": b" " * 70_000}, "INVALID_SCHEMA", None),
    ],
)
async def test_a_definition_without_meaning_is_refused(
    registry: Registry, changes: dict[str, Any], why: str, field: str | None
) -> None:
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool(**changes))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await registry.ann.RegisterTool(request)
    code, found, metadata = reason(error.value)
    assert (code, found, metadata.get("field")) == (grpc.StatusCode.INVALID_ARGUMENT, why, field)


@pytest.mark.parametrize(
    ("name", "version"), [("a\0b", 0), ("a.b", 0), ("x" * 100_000, 0), ("", 0), ("add", 2**32 - 1), ("a\0b", 1)]
)
async def test_what_no_tool_can_be_called_is_not_found(registry: Registry, name: str, version: int) -> None:
    """Neither a name nor a version can upset the database."""
    absent = (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")
    assert await refusal(registry.ann.GetTool(tool_pb2.GetToolRequest(name=name, version=version))) == absent
    if name != "add":
        assert await refusal(registry.ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name=name))) == absent
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await resolve(registry, name)
        assert reason(error.value)[:2] == absent


async def test_what_a_definition_leaves_open_is_the_cautious_choice(registry: Registry) -> None:
    """TOOL-2."""
    made = await register(registry, category=0, effect_class=0)
    assert (made.definition.category, made.definition.effect_class) == (2, 4)


async def test_versions_of_loaded_tools_are_the_same_after_a_restart_and_in_every_replica(
    database_url: str, tmp_path: Path
) -> None:
    async with running(database_url, tmp_path, [add]) as first:
        assert await resolve(first) == {"add": 1}
        async with running(database_url, tmp_path, [add_changed], name="b") as newer:
            assert await resolve(newer) == {"add": 2}
            assert await resolve(newer, pinned={"add": 1}) == {"add": 1}
            assert await resolve(first) == {"add": 1}
    async with running(database_url, tmp_path, [add, add_changed]) as restarted:
        # Both have the name: the second is left out, and logged.
        assert await resolve(restarted) == {"add": 1}


async def test_a_run_goes_on_without_a_tool_that_is_not_loaded_any_more(database_url: str, tmp_path: Path) -> None:
    """TOOL-1: only a call of it is refused."""

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
        assert "not available any more" in verdict.error_message


async def test_users_cannot_reach_the_execution_service(registry: Registry, tmp_path: Path) -> None:
    async with open_channel(registry.address, service_key="key-of-ann-of-acme") as channel:
        resolved = ExecutionServiceStub(channel).ResolveTools(execution_pb2.ResolveToolsRequest(context=context()))
        assert await refusal(resolved) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_services_cannot_register_without_a_user(registry: Registry) -> None:
    async with open_channel(registry.address, service_key=SERVICE_KEY) as channel:
        made = ToolServiceStub(channel).RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
        assert await refusal(made) == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


@pytest.mark.parametrize("field", ["store_id", "user_id"])
async def test_a_malformed_id_is_refused_by_name(registry: Registry, field: str) -> None:
    who = context()
    setattr(who, field, "a/b")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await registry.execution.ResolveTools(execution_pb2.ResolveToolsRequest(context=who))
    assert reason(error.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ID", {"field": field})


async def test_only_an_admin_makes_a_front_end_tool_laxer_or_takes_a_restricted_one_out(registry: Registry) -> None:
    """C6: who may not approve must not be able to take the gate away."""
    denied = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    gated = front_end_tool(category=2, effect_class=4, approvals_required=2, allowed_user_ids=["ann"])
    ann, root, vic = (registry.users["acme", user] for user in ("ann", "root", "vic"))
    assert await refusal(vic.RegisterTool(tool_pb2.RegisterToolRequest(definition=gated))) == denied
    await ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=gated))
    less: tuple[dict[str, Any], ...] = (
        {"category": 1},
        {"approvals_required": 1},
        {"effect_class": 1},
        {"allowed_user_ids": []},
        {"allowed_user_ids": ["ann", "bob"]},
    )
    for laxer in less:
        fields: dict[str, Any] = {
            "category": 2,
            "effect_class": 4,
            "approvals_required": 2,
            "allowed_user_ids": ["ann"],
        } | laxer
        request = tool_pb2.RegisterToolRequest(definition=front_end_tool(**fields), replace=True)
        assert await refusal(ann.RegisterTool(request)) == denied
    assert await refusal(ann.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))) == denied
    free = tool_pb2.RegisterToolRequest(definition=front_end_tool(), replace=True)
    assert await refusal(registry.users["acme", "shop"].RegisterTool(free, metadata=FOR_ANN)) == denied
    stricter = front_end_tool(category=3, effect_class=4, approvals_required=3, allowed_user_ids=["ann"])
    await ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=stricter, replace=True))
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool(), replace=True))
    await root.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))


async def test_a_front_end_tool_is_its_users_and_the_admins_to_replace_and_to_take_out(registry: Registry) -> None:
    denied = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    mel, other, root = (registry.users["acme", user] for user in ("mel", "max", "root"))
    changed = tool_pb2.RegisterToolRequest(definition=front_end_tool(description="Changed."), replace=True)
    out = tool_pb2.UnregisterToolRequest(name="show_chart")
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    assert await refusal(mel.RegisterTool(changed)) == denied
    assert await refusal(mel.UnregisterTool(out)) == denied
    await mel.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))  # As it is: nothing changes.
    await root.UnregisterTool(out)
    await mel.RegisterTool(changed)
    assert await refusal(other.UnregisterTool(out)) == denied
    await mel.UnregisterTool(out)
    await other.RegisterTool(changed)
    await root.UnregisterTool(out)


@pytest.mark.parametrize("user", ["vic", "apu", "olga", "machine"])
async def test_who_is_neither_member_nor_admin_takes_no_name(registry: Registry, user: str) -> None:
    request = tool_pb2.RegisterToolRequest(definition=front_end_tool())
    refused = await refusal(registry.users["acme", user].RegisterTool(request))
    assert refused == (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")


async def test_a_name_that_was_taken_out_does_not_come_back_laxer(registry: Registry) -> None:
    ann, root, mel = (registry.users["acme", user] for user in ("ann", "root", "mel"))
    await ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool(category=3)))
    await root.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))
    lax = tool_pb2.RegisterToolRequest(definition=front_end_tool())
    assert (await refusal(mel.RegisterTool(lax)))[1] == "PERMISSION_DENIED"
    await root.RegisterTool(lax)


async def test_front_end_tools_have_a_bound_for_each_user_and_for_the_store(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering, "SHARES", {"store": registering.Share(of_user=2, of_store=4)})
    mel, other, root = (registry.users["acme", user] for user in ("mel", "max", "root"))

    async def add(user: Any, name: str) -> Any:
        return await user.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool(name)))

    full = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    await add(mel, "one")
    await add(mel, "two")
    assert await refusal(add(mel, "three")) == full
    await add(mel, "two")  # It is there.
    await add(other, "three")
    await mel.UnregisterTool(tool_pb2.UnregisterToolRequest(name="one"))
    await add(mel, "one")
    await add(root, "four")
    assert await refusal(add(root, "five")) == full


async def test_of_too_many_tools_those_are_taken_that_nobody_can_push_out(registry: Registry) -> None:
    """What a member registers fails no run of another user and takes no tool from it."""
    mel, other = registry.users["acme", "mel"], registry.users["acme", "max"]
    for user, name in ((mel, "mel_1"), (other, "a_max_1"), (mel, "mel_2"), (other, "a_max_2")):
        await user.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool(name)))

    async def taken(user: str, most: int, *names: str) -> tuple[list[str], int]:
        request = execution_pb2.ResolveToolsRequest(context=context(user=user), tool_names=names, tools_max=most)
        answer = await registry.execution.ResolveTools(request)
        return [each.definition.name for each in answer.tools], answer.left_out_count

    assert await taken("mel", 3) == (["add", "mel_1", "mel_2"], 2)
    assert await taken("max", 4) == (["a_max_1", "a_max_2", "add", "mel_1"], 1)
    assert await taken("max", 5) == (["a_max_1", "a_max_2", "add", "mel_1", "mel_2"], 0)
    assert await taken("max", 2, "mel_2", "add", "a_max_1") == (["add", "mel_2"], 1)


async def test_tools_that_are_too_large_together_are_left_out(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registering, "TOOLS_BYTES_MAX", 5000)
    for name in ("one", "two"):
        await register(registry, name=name, description="x" * 4000)
    request = execution_pb2.ResolveToolsRequest(context=context(), tools_max=128)
    answer = await registry.execution.ResolveTools(request)
    assert [each.definition.name for each in answer.tools] == ["add", "one", "private"]
    assert answer.left_out_count == 1
