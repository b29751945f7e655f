"""Tools of HTTP services against a real server: requests, results, secrets, unknown outcomes (TOOL-8)."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField, InvalidSchema, SourceUnreachable
from pawl.event.v1 import call_pb2
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.policy import read_rules
from pawl.tool.v1 import source_pb2
from pawl.tool_registry.sources.http.rules.openapi_document import DOCUMENT_BYTES_MAX
from pawl.tool_registry.sources.http.tools import HttpTools
from pawl.tool_registry.sources.process.helpers import Helpers
from pawl.tool_registry.sources.rules import DiscoveredTool
from pawl.tool_registry.sources.source import Source
from pawl.tools import OutcomeUnknown, Tool, ToolContext, ToolError
from pawl.tools.rules.definition import RESULT_BYTES_MAX, ToolVersion
from pawl.tools.sdk.context import ResultTooLarge
from pawl.values import Category, EffectClass
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import content, error_of, outcome, running
from tests.web_server import Reply, WebServer, pages, web_server

SECRETS = {"token": "Bearer 0123456789abcdef", "broken": "0123456789\r\nX-Other: 1"}
JSON = {"Content-Type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "q": {"type": "string"}, "items": {"type": "array"}},
    "required": ["id"],
}


def document(port: int, **operations: Any) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "servers": [{"url": f"http://127.0.0.1:{port}"}],
        "paths": {f"/{name}": {method: {"operationId": name}} for name, method in operations.items()},
    }


@dataclass
class World:
    server: WebServer
    connector: HttpTools
    helpers: Helpers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def discover(self, config: dict[str, Any], *, store: str = "acme") -> list[DiscoveredTool]:
        source = Source(
            store_id=StoreId(store), config=json_format.ParseDict(config | {"name": "shop"}, source_pb2.SourceConfig())
        )
        return list((await self.connector.discover(source)).tools)

    async def endpoint(self, path: str, method: str = "GET", **changes: Any) -> DiscoveredTool:
        fields = {
            "url": self.url + path,
            "method": method,
            "description": "Do.",
            "argumentsSchemaJson": encoded(SCHEMA),
        }
        (tool,) = await self.discover({"httpEndpoint": fields | changes})
        return tool

    def tool(self, discovered: DiscoveredTool, **changes: Any) -> Tool[..., Any]:
        entry = ToolVersion(
            store_id=StoreId("acme"),
            definition=replace(discovered.definition, **changes),
            version=1,
            source="http:shop",
            create_time=0,
            binding=discovered.binding,
        )
        tool = self.connector.tool(entry)
        assert tool is not None
        return tool

    async def call(self, discovered: DiscoveredTool, arguments: Any = None, *, store: str = "acme", **more: Any) -> Any:
        context = ToolContext(store_id=store, call_id="call", traceparent=TRACEPARENT, _find_secret=SECRETS.__getitem__)
        return await self.tool(discovered, **more)(arguments=arguments or {"id": "1"}, context=context)


TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def encoded(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else json.dumps(value).encode()).decode()


@asynccontextmanager
async def http_world() -> AsyncIterator[World]:
    replies = {
        "/json": Reply(b'{"a": [1, 2.5, null]}', headers=JSON),
        "/text": Reply("naïve".encode(), headers={"Content-Type": "text/plain"}),
        "/not-json": Reply(b'{"a": NaN}', headers=JSON),
        "/none": Reply(status=204),
        "/image": Reply(b"\x89PNG", headers={"Content-Type": "image/png"}),
        "/large": Reply(b"a" * (RESULT_BYTES_MAX + 1), headers={"Content-Type": "text/plain"}),
        "/huge": Reply(b"a" * (DOCUMENT_BYTES_MAX + 1), headers=JSON),
        "/refuses": Reply(b"no such order " + b"x" * 5000, status=422),
        "/fails": Reply(status=500),
        "/moved": Reply(status=302, headers={"Location": "/json"}),
        "/inside": Reply(status=302, headers={"Location": "http://169.254.169.254/"}),
        "/breaks": Reply(breaks=True),
        "/page": Reply(b"<html>"),
    }
    async with web_server(pages(replies)) as server:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{server.port}"])}
        egress = GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with Helpers() as helpers:
            yield World(server, HttpTools(egress, helpers), helpers)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with http_world() as world:
        yield world


async def test_secrets_appear_in_headers_but_not_in_bindings(world: World) -> None:
    tool = await world.endpoint("/json", secretHeaders={"Authorization": "token"})
    assert SECRETS["token"].encode() not in tool.binding
    await world.call(tool)
    assert world.server.asked[0].headers["authorization"] == SECRETS["token"]
    assert world.server.asked[0].headers["traceparent"] == TRACEPARENT
    broken = await world.endpoint("/json", secretHeaders={"Authorization": "broken"})
    error = await raises(
        ToolError, world.call(broken), match="the secret 'broken' contains characters that are not allowed in a header"
    )
    assert "0123456789" not in str(error)
    assert len(world.server.asked) == 1


async def test_idempotency_key_depends_on_the_store_and_the_call(world: World) -> None:
    tool = await world.endpoint("/json", "POST", idempotencyHeader="Idempotency-Key")
    world.connector = HttpTools(
        GuardedEgress(
            {"*": read_rules(None, [f"127.0.0.1:{world.server.port}"])}, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        ),
        world.helpers,
    )
    for store in ("acme", "acme", "other"):
        await world.call(tool, store=store)
    first, again, other = (asked.headers["idempotency-key"] for asked in world.server.asked)
    assert first == again != other
    assert "acme" not in first


async def test_document_is_read_from_the_source_or_fetched(world: World) -> None:
    found = await world.discover({"openApi": {"document": encoded(document(world.server.port, json="get"))}})
    assert [tool.definition.name for tool in found] == ["shop.json"]
    assert await world.call(found[0], {"x": 1}) == {"a": [1, 2.5, None]}
    world.server.asked.clear()
    world.server.answer = pages({"/doc": Reply(b"openapi: 3.0.0\npaths: {/a: {delete: {operationId: gone}}}")})
    config = {"documentUrl": f"{world.url}/doc", "secretHeaders": {"Authorization": "token"}}
    (tool,) = await world.discover({"openApi": config})
    assert (tool.definition.name, tool.definition.category) == ("shop.gone", "DESTRUCTIVE")
    assert json.loads(tool.binding)["url"] == f"{world.url}/a"
    assert "authorization" not in world.server.asked[0].headers


async def test_source_with_an_unavailable_document_is_unreachable(world: World) -> None:
    await raises(
        SourceUnreachable,
        *(world.discover({"openApi": {"documentUrl": world.url + path}}) for path in ("/nothing", "/breaks")),
        match="document_url",
    )
    await raises(
        InvalidField,
        world.discover({"openApi": {"documentUrl": f"{world.url}/page"}}),
        match=r"neither JSON nor YAML|not an object",
    )
    await raises(
        InvalidField, world.discover({"openApi": {"documentUrl": f"{world.url}/huge"}}), match="larger than the limit"
    )


async def test_http_call_follows_the_usual_call_lifecycle(world: World, database_url: str, tmp_path: Path) -> None:
    world.server.answer = lambda asked: Reply(
        f"you said {asked.headers['authorization']}".encode(),
        status=403 if asked.target == "/fails" else 200,
        headers={"Content-Type": "text/plain"},
    )
    tools = [
        world.tool(
            await world.endpoint(path, "POST", secretHeaders={"Authorization": "token"}),
            name=name,
            category=Category.SAFE,
        )
        for name, path in (("works", "/"), ("fails", "/fails"), ("breaks", "/breaks"))
    ]
    async with running(database_url, tmp_path, tools, secrets={"acme": SECRETS}) as registry:
        works = await registry.run("works", {"id": "1"}, call="a")
        assert (outcome(works), content(works)) == ("SUCCEEDED", "you said [secret]")
        fails = await registry.run("fails", {"id": "1"}, call="b")
        assert error_of(fails) == "the service answered with status 403: you said [secret]"
        world.server.answer = lambda _: Reply(breaks=True)
        assert outcome(await registry.run("breaks", {"id": "1"}, call="c")) == "UNKNOWN OUTCOME_UNKNOWN"
    assert all(asked.headers["authorization"] == SECRETS["token"] for asked in world.server.asked)


async def test_shared_secret_is_not_sent_to_a_service_added_by_a_store(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """I13, TOOL-4: an admin of a store chooses where the store's secrets are sent.

    The deployment's secrets belong to no store.
    """
    secrets = {"*": {"token": "Bearer of-the-deployment"}, "acme": {"own": "Bearer of-the-store"}}
    world.server.answer = lambda _: Reply(b"{}", headers=JSON)

    def connectors(*_: object) -> dict[str, HttpTools]:
        return {"http": world.connector}

    async with running(database_url, tmp_path, connectors=connectors, secrets=secrets) as registry:
        for name in ("token", "own"):
            endpoint = source_pb2.HttpEndpointConfig(
                url=f"{world.url}/json", method="GET", description="Look.", secret_headers={"Authorization": name}
            )
            policies = [source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)]
            config = source_pb2.SourceConfig(name=name, http_endpoint=endpoint, policies=policies)
            await registry.sources["acme", "root"].AddSource(source_pb2.AddSourceRequest(config=config))
        assert error_of(await registry.run("token.call", call="a")) == "no secret named 'token' is configured"
        assert outcome(await registry.run("own.call", call="b")) == "SUCCEEDED"
    assert [asked.headers["authorization"] for asked in world.server.asked] == ["Bearer of-the-store"]


async def test_fetched_document_cannot_choose_where_secrets_go(world: World) -> None:
    """The document's author, or an attacker who changes it, could name a server that no admin has seen."""
    async with web_server(pages({})) as elsewhere:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{port}" for port in (world.server.port, elsewhere.port)])}
        connector = HttpTools(GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), world.helpers)
        theirs = World(world.server, connector, world.helpers)
        written = json.dumps(document(elsewhere.port, look="get")).encode()
        world.server.answer = lambda _: Reply(written, headers=JSON)
        fetched: dict[str, Any] = {"documentUrl": f"{world.url}/doc"}
        secret = {"secretHeaders": {"Authorization": "token"}}
        await raises(
            InvalidField,
            theirs.discover({"openApi": fetched | secret}),
            match="because only the document lists that server",
        )
        base = f"http://127.0.0.1:{elsewhere.port}"
        for given in (fetched, fetched | secret | {"baseUrl": base}, {"document": encoded(written)} | secret):
            assert len(await theirs.discover({"openApi": given})) == 1


async def test_arguments_go_into_the_url_or_the_body(world: World) -> None:
    tool = await world.endpoint("/json?fixed=1&id={id}")
    assert (tool.definition.name, tool.definition.category, tool.definition.effect) == (
        "shop.call",
        "SENSITIVE",
        "AT_MOST_ONCE",
    )
    assert await world.call(tool, {"id": "a/b&c", "q": "x y", "items": [1, "b"]}) == {"a": [1, 2.5, None]}
    tool = await world.endpoint("/json?id={id}", "POST", headers={"X-Shop": "7"})
    await world.call(tool, {"id": "1", "q": "ä", "items": [True]})
    get, post = world.server.asked
    assert (get.method, get.target) == ("GET", "/json?fixed=1&id=a%2Fb%26c&q=x%20y&items=1&items=b")
    assert get.headers["accept"].startswith("application/json")
    assert (post.method, post.target, json.loads(post.body)) == ("POST", "/json?id=1", {"q": "ä", "items": [True]})
    assert (post.headers["content-type"], post.headers["x-shop"]) == ("application/json", "7")
    assert (await world.endpoint("/json", "DELETE")).definition.category is Category.DESTRUCTIVE
    shown = world.tool(await world.endpoint("/orders/{id}", "POST", secretHeaders={"Authorization": "token"}))
    preview = shown.preview({"id": "7", "q": "x"})
    assert preview is not None
    assert preview() == f'POST {world.url}/orders/7\n\n{{"q":"x"}}'


async def test_success_response_is_the_result_and_any_other_is_an_error(world: World) -> None:
    for path, result in {
        "/text": "naïve",
        "/not-json": '{"a": NaN}',
        "/none": {"status": 204},
        "/image": {"status": 200, "content_type": "image/png", "bytes": 4},
        "/moved": {"a": [1, 2.5, None]},
    }.items():
        assert await world.call(await world.endpoint(path)) == result, path
    for path, says in {
        "/refuses": r"status 422: no such order x{1986}$",
        "/fails": r"status 500$",
        "/large": "took effect, but its result cannot be read",
        "/inside": "169.254.169.254 is not an allowed address",
    }.items():
        raised = await raises(ToolError, world.call(await world.endpoint(path)), match=says)
        assert isinstance(raised, ResultTooLarge) is (path == "/large")
    world.server.asked.clear()
    await raises(ToolError, world.call(await world.endpoint("/moved", "POST")), match="status 302")
    assert len(world.server.asked) == 1, "a POST does not follow redirects"


async def test_an_interrupted_call_has_an_unknown_outcome_unless_it_is_repeatable_or_was_never_sent(
    world: World,
) -> None:
    tool = await world.endpoint("/breaks", "POST")
    await raises(OutcomeUnknown, world.call(tool))
    await raises(
        ToolError,
        *(world.call(tool, effect=effect) for effect in (EffectClass.READ_ONLY, EffectClass.IDEMPOTENT)),
        match="sent an invalid response",
    )
    sent = world.server.connections
    await raises(ToolError, world.call(tool, store="other"), match="is not allowed")
    egress = GuardedEgress({"*": read_rules(None, ["127.0.0.1:9"])}, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    world.connector = HttpTools(egress, world.helpers)
    await raises(ToolError, world.call(await world.endpoint("/", url="http://127.0.0.1:9/")), match="cannot connect to")
    assert world.server.connections == sent


async def test_invalid_configuration_is_rejected(world: World) -> None:
    endpoints: list[tuple[dict[str, Any], str]] = [
        ({"method": "TRACE"}, "method"),
        ({"method": "HEAD"}, "method"),
        ({"url": "ftp://a.example"}, "url"),
        ({"url": "http://{id}.example/"}, "url"),
        ({"url": "http://a.example:{id}/"}, "url"),
        ({"url": "http://a.example{id}"}, "url"),
        ({"url": "http://a.example/{q}"}, "url"),
        ({"url": "http://a.example/{none}"}, "url"),
        ({"url": "http://a.example/{id"}, "url"),
        ({"url": "http://user@a.example/"}, "url"),
        ({"url": "http://169.254.169.254/"}, "config"),
        ({"url": "http://127.0.0.1:1/"}, "config"),
        ({"url": "http://a.example/", "secretHeaders": {"X": "token"}}, "config"),
        ({"headers": {"Host": "a"}}, "headers"),
        ({"headers": {"X": "a\r\nY: b"}}, "headers"),
        ({"headers": {"X": "1"}, "secretHeaders": {"x": "token"}}, "headers"),
        ({"secretHeaders": {"Content-Length": "token"}}, "secret_headers"),
        ({"secretHeaders": {"X": ""}}, "secret_headers"),
        ({"idempotencyHeader": "a b"}, "idempotency_header"),
        ({"argumentsSchemaJson": encoded(b"[]")}, "arguments_schema_json"),
        ({"argumentsSchemaJson": encoded(b"{")}, "arguments_schema_json"),
    ]
    written = encoded(document(world.server.port, json="get"))
    documents: list[tuple[dict[str, Any], str]] = [
        ({}, "document"),
        ({"document": "e30=", "documentUrl": "http://a.example"}, "document"),
        ({"document": "e30="}, "document"),
        ({"documentUrl": "http://169.254.169.254/"}, "document_url"),
        ({"document": written, "operationIds": ["none"]}, "document"),
        ({"document": written, "baseUrl": "http://10.0.0.1"}, "config"),
        ({"document": written, "baseUrl": "http://a.example?x"}, "base_url"),
        ({"document": written, "baseUrl": "nonsense"}, "base_url"),
    ]
    tries: list[tuple[Awaitable[Any], str]] = [
        (world.endpoint("/json", **changes), field) for changes, field in endpoints
    ]
    tries += [(world.discover({"openApi": changes}), field) for changes, field in documents]
    for number, (attempt, field) in enumerate(tries):
        assert (await raises(InvalidField, attempt)).metadata["field"].rpartition(".")[2] == field, number
    assert world.server.connections == 0
    await raises(InvalidSchema, world.endpoint("/json", argumentsSchemaJson=encoded({"type": "array"})))


async def test_body_with_many_items_is_bulk_at_any_depth(world: World, database_url: str, tmp_path: Path) -> None:
    """HITL-2: even if a policy declares a service safe, a request with a hundred items needs approval."""
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

    async with running(database_url, tmp_path, connectors=lambda *_: {"http": world.connector}) as registry:
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
