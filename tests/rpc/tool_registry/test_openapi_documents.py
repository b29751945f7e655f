"""OpenAPI documents of all sizes as sources, and bulk calls of what they describe."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import source_pb2
from pawl.tool_registry.adapters.http.tools import KIND
from pawl.tool_registry.domain.openapi_document import KEPT_BYTES_MAX
from pawl.tool_registry.domain.source import Source
from tests.rpc.tool_registry.http_world import JSON, World, encoded, http_world
from tests.rpc.tool_registry.registry import running
from tests.web_server import Reply


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A service with some answers; only the store acme may reach it."""
    async with http_world() as world:
        yield world


def large_document(operations: int = 300) -> dict[str, Any]:
    """A document over what is kept, of which each operation needs little, and one a parameter of another path."""
    schemas = {
        f"S{number}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/components/schemas/T{number}"}, "text": {"description": "x" * 9000}},
        }
        for number in range(operations)
    } | {f"T{number}": {"type": "string", "maxLength": number + 1} for number in range(operations)}

    def operation(number: int) -> dict[str, Any]:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/S{number}"}}}
        return {
            "operationId": f"op{number}",
            "parameters": [{"name": "q", "in": "query", "schema": {"type": "string"}}],
            "requestBody": {"content": content},
            "responses": {"200": {"description": "y" * 2000}},
        }

    paths: dict[str, Any] = {f"/{number}": {"post": operation(number)} for number in range(operations)}
    paths["/0"]["post"]["parameters"] = [{"$ref": "#/paths/~17/post/parameters/0"}]
    return {
        "openapi": "3.0.0",
        "servers": [{"url": "https://a.example"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }


async def test_of_a_large_document_what_was_chosen_is_kept(world: World, database_url: str, tmp_path: Path) -> None:
    whole = json.dumps(large_document()).encode()
    assert len(whole) > KEPT_BYTES_MAX
    chosen = source_pb2.OpenApiConfig(document=whole, base_url=world.url, operation_ids=["op0", "op250"])
    async with running(database_url, tmp_path, connectors=lambda *_: {KIND: world.connector}) as registry:
        admin = registry.sources["acme", "root"]
        config = source_pb2.SourceConfig(name="shop", open_api=chosen)
        for _ in range(2):  # The same again is the same.
            added = (await admin.AddSource(source_pb2.AddSourceRequest(config=config))).source
        kept = json.loads(added.config.open_api.document)
        assert list(kept["paths"]) == ["/0", "/250", "/7"]
        assert set(kept["components"]["schemas"]) == {"S0", "T0", "S250", "T250"}
        schemas = [json.loads(tool.definition.arguments_schema_json) for tool in added.tools]
        assert [sorted(schema["properties"]) for schema in schemas] == [["body", "q"], ["body", "q"]]
        assert schemas[1]["$defs"]["T250"] == {"type": "string", "maxLength": 251}
        checked = await admin.CheckSource(source_pb2.CheckSourceRequest(name="shop"))
        assert checked.source.state == source_pb2.SOURCE_STATE_READY
    with pytest.raises(InvalidField, match="the limit is 200: choose some"):
        await world.connector.prepared(
            Source(
                store_id=StoreId("acme"),
                name="shop",
                kind=KIND,
                config=json.dumps({"openApi": {"document": encoded(whole)}}).encode(),
            )
        )


async def test_a_large_document_is_read_from_its_url(world: World) -> None:
    whole = json.dumps(large_document()).encode()
    world.server.answer = lambda _: Reply(whole, headers=JSON)
    config = {"documentUrl": f"{world.url}/doc", "baseUrl": world.url, "operationIds": ["op3"]}
    (tool,) = await world.discover({"openApi": config})
    assert tool.definition.name == "shop.op3"


async def test_a_path_may_have_a_fixed_query(world: World) -> None:
    written = {
        "openapi": "3.0.0",
        "paths": {"/json?method=look": {"get": {"operationId": "look", "parameters": [{"name": "q", "in": "query"}]}}},
    }
    (tool,) = await world.discover({"openApi": {"document": encoded(written), "baseUrl": world.url}})
    await world.call(tool, {"q": "a b"})
    assert world.server.asked[-1].target == "/json?method=look&q=a%20b"


async def test_a_type_that_is_no_text_is_any_type(world: World) -> None:
    parameter = {"name": "q", "in": "query", "schema": {"type": ["string", {"x": 1}, 5]}}
    written = {"openapi": "3.1.0", "paths": {"/json": {"get": {"operationId": "look", "parameters": [parameter]}}}}
    (tool,) = await world.discover({"openApi": {"document": encoded(written), "baseUrl": world.url}})
    assert tool.definition.arguments_schema["properties"]["q"] == {"type": ["string"]}


async def test_a_body_of_many_things_is_bulk_wherever_they_are_in_it(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """A policy that calls a service safe has not said that it may be asked for a hundred things at once. HITL-2."""
    written = {
        "openapi": "3.1.0",
        "servers": [{"url": world.url}],
        "paths": {
            f"/{name}": {
                "post": {"operationId": name, "requestBody": {"content": {"application/json": {"schema": {}}}}}
            }
            for name in ("plain", "counted")
        },
    }
    open_api = source_pb2.OpenApiConfig(document=json.dumps(written).encode())
    safe = call_pb2.TOOL_CATEGORY_SAFE
    policies = [
        source_pb2.SourceToolPolicy(tool_name="*", category=safe),
        source_pb2.SourceToolPolicy(tool_name="counted", category=safe, bulk_count="$.body.orders[*].lines"),
    ]

    async with running(database_url, tmp_path, connectors=lambda *_: {KIND: world.connector}) as registry:
        config = source_pb2.SourceConfig(name="shop", open_api=open_api, policies=policies)
        await registry.sources["acme", "root"].AddSource(source_pb2.AddSourceRequest(config=config))
        many = {"body": {"orders": [{"id": number, "lines": [1]} for number in range(100)]}}
        few = {"body": {"orders": [{"id": 1, "lines": [1, 2]}], "tags": ["a"] * 100}}
        verdicts = [
            await registry.check(f"shop.{tool}", arguments, call=f"{tool}{number}")
            for number, arguments in enumerate((many, few))
            for tool in ("plain", "counted")
        ]
        assert [verdict.approval_cause for verdict in verdicts] == ["bulk of 100", "bulk of 100", "bulk of 100", ""]
