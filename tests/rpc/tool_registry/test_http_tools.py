"""Tools of HTTP services, against a real server: requests, results, secrets, doubts. TOOL-8."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import read_rules
from pawl.errors import InvalidField, InvalidSchema, SourceUnreachable
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import source_pb2
from pawl.tool_registry.adapters.http.tools import KIND, HttpTools
from pawl.tool_registry.domain.definition import Category, EffectClass
from pawl.tool_registry.sdk.context import ResultTooLarge
from pawl.tools import OutcomeUnknown, ToolError
from tests.rpc.tool_registry.http_world import JSON, SECRETS, World, document, encoded, http_world
from tests.rpc.tool_registry.registry import content, outcome, running
from tests.web_server import Reply, pages, web_server


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A service with some answers; only the store acme may reach it."""
    async with http_world() as world:
        yield world


async def test_an_endpoint_is_called(world: World) -> None:
    tool = await world.endpoint("/json?fixed=1&id={id}")
    assert tool.definition.name == "shop.call"
    assert (tool.definition.category, tool.definition.effect) == ("SENSITIVE", "AT_MOST_ONCE")
    assert await world.call(tool, {"id": "a/b&c", "q": "x y", "items": [1, "b"]}) == {"a": [1, 2.5, None]}
    (asked,) = world.server.asked
    assert (asked.method, asked.target) == ("GET", "/json?fixed=1&id=a%2Fb%26c&q=x%20y&items=1&items=b")
    assert asked.headers["accept"].startswith("application/json")


async def test_what_is_not_in_the_url_goes_into_the_body(world: World) -> None:
    tool = await world.endpoint("/json?id={id}", "POST", headers={"X-Shop": "7"})
    await world.call(tool, {"id": "1", "q": "ä", "items": [True]})
    (asked,) = world.server.asked
    assert (asked.method, asked.target, json.loads(asked.body)) == ("POST", "/json?id=1", {"q": "ä", "items": [True]})
    assert (asked.headers["content-type"], asked.headers["x-shop"]) == ("application/json", "7")


async def test_what_deletes_is_destructive(world: World) -> None:
    assert (await world.endpoint("/json", "DELETE")).definition.category is Category.DESTRUCTIVE


@pytest.mark.parametrize(
    ("path", "result"),
    [
        ("/text", "naïve"),
        ("/not-json", '{"a": NaN}'),
        ("/none", {"status": 204}),
        ("/image", {"status": 200, "content_type": "image/png", "bytes": 4}),
        ("/moved", {"a": [1, 2.5, None]}),
    ],
)
async def test_a_good_answer_is_the_result(world: World, path: str, result: Any) -> None:
    assert await world.call(await world.endpoint(path)) == result


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/refuses", r"status 422: no such order x{1986}$"),
        ("/fails", r"status 500$"),
        ("/large", "has happened, but its result cannot be read"),
        ("/inside", "169.254.169.254 is not an address"),
    ],
)
async def test_any_other_answer_is_an_error(world: World, path: str, says: str) -> None:
    with pytest.raises(ToolError, match=says) as raised:
        await world.call(await world.endpoint(path))
    assert isinstance(raised.value, ResultTooLarge) is (path == "/large")


async def test_a_post_is_not_sent_on_by_a_redirect(world: World) -> None:
    with pytest.raises(ToolError, match="status 302"):
        await world.call(await world.endpoint("/moved", "POST"))
    assert len(world.server.asked) == 1


async def test_a_call_that_broke_off_is_of_unknown_outcome_unless_it_may_be_repeated(world: World) -> None:
    tool = await world.endpoint("/breaks", "POST")
    with pytest.raises(OutcomeUnknown):
        await world.call(tool)
    for effect in (EffectClass.READ_ONLY, EffectClass.IDEMPOTENT):
        with pytest.raises(ToolError, match="did not answer as it should"):
            await world.call(tool, effect=effect)


async def test_a_call_that_was_never_sent_is_an_error_and_no_doubt(world: World) -> None:
    tool = await world.endpoint("/json")
    with pytest.raises(ToolError, match="may not be reached"):
        await world.call(tool, store="other")
    rules = {"*": read_rules(None, ["127.0.0.1:9"])}
    world.connector = HttpTools(
        GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), world.connector._helper
    )
    with pytest.raises(ToolError, match="cannot be connected to"):
        await world.call(await world.endpoint("/", url="http://127.0.0.1:9/"))
    assert world.server.connections == 0


async def test_secrets_go_into_headers_and_are_in_no_binding(world: World) -> None:
    tool = await world.endpoint("/json", secretHeaders={"Authorization": "token"})
    assert SECRETS["token"].encode() not in tool.binding
    await world.call(tool)
    assert world.server.asked[0].headers["authorization"] == SECRETS["token"]
    broken = await world.endpoint("/json", secretHeaders={"Authorization": "broken"})
    with pytest.raises(ToolError, match="the secret 'broken' cannot stand in a header") as error:
        await world.call(broken)
    assert "0123456789" not in str(error.value)
    assert len(world.server.asked) == 1


async def test_an_idempotency_key_is_of_the_store_and_the_call(world: World) -> None:
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


async def test_the_preview_shows_the_request(world: World) -> None:
    tool = world.tool(await world.endpoint("/orders/{id}", "POST", secretHeaders={"Authorization": "token"}))
    assert tool.preview({"id": "7", "q": "x"}) == f'POST {world.url}/orders/7\n\n{{"q":"x"}}'


async def test_a_document_is_read_from_the_source_or_fetched(world: World) -> None:
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


async def test_the_configuration_is_the_json_of_the_message(world: World) -> None:
    text = json.dumps(document(world.server.port, json="get")).encode()
    config = source_pb2.SourceConfig(
        name="shop",
        open_api=source_pb2.OpenApiConfig(document=text, secret_headers={"X-Key": "token"}, operation_ids=["json"]),
        policies=[source_pb2.SourceToolPolicy(tool_name="*", timeout_seconds=5)],
    )
    (tool,) = await world.discover(json_format.MessageToDict(config))
    assert json.loads(tool.binding)["secret_headers"] == {"X-Key": "token"}
    single = source_pb2.SourceConfig(
        name="shop",
        http_endpoint=source_pb2.HttpEndpointConfig(
            url=f"{world.url}/json", method="GET", description="Do.", arguments_schema_json=b'{"type": "object"}'
        ),
    )
    (tool,) = await world.discover(json_format.MessageToDict(single))
    assert await world.call(tool) == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": "TRACE"}, "http_endpoint.method"),
        ({"method": "HEAD"}, "http_endpoint.method"),
        ({"url": "ftp://a.example"}, "http_endpoint.url"),
        ({"url": "http://{id}.example/"}, "http_endpoint.url"),
        ({"url": "http://a.example:{id}/"}, "http_endpoint.url"),
        ({"url": "http://a.example{id}"}, "http_endpoint.url"),
        ({"url": "http://a.example/{q}"}, "http_endpoint.url"),
        ({"url": "http://a.example/{none}"}, "http_endpoint.url"),
        ({"url": "http://a.example/{id"}, "http_endpoint.url"),
        ({"url": "http://user@a.example/"}, "http_endpoint.url"),
        ({"url": "http://169.254.169.254/"}, "config"),
        ({"url": "http://127.0.0.1:1/"}, "config"),
        ({"url": "http://a.example/", "secretHeaders": {"X": "token"}}, "config"),
        ({"headers": {"Host": "a"}}, "http_endpoint.headers"),
        ({"headers": {"X": "a\r\nY: b"}}, "http_endpoint.headers"),
        ({"headers": {"X": "1"}, "secretHeaders": {"x": "token"}}, "http_endpoint.headers"),
        ({"secretHeaders": {"Content-Length": "token"}}, "http_endpoint.secret_headers"),
        ({"secretHeaders": {"X": ""}}, "http_endpoint.secret_headers"),
        ({"idempotencyHeader": "a b"}, "http_endpoint.idempotency_header"),
        ({"argumentsSchemaJson": encoded(b"[]")}, "http_endpoint.arguments_schema_json"),
        ({"argumentsSchemaJson": encoded(b"{")}, "http_endpoint.arguments_schema_json"),
        ({"method": 1}, "config"),
    ],
)
async def test_an_endpoint_that_cannot_be_used_is_refused(world: World, changes: Any, field: str) -> None:
    with pytest.raises(InvalidField) as error:
        await world.endpoint("/json", **changes)
    assert error.value.metadata["field"] == field
    assert world.server.connections == 0


async def test_a_schema_that_cannot_be_used_is_refused(world: World) -> None:
    with pytest.raises(InvalidSchema):
        await world.endpoint("/json", argumentsSchemaJson=encoded({"type": "array"}))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "config"),
        ({"openApi": {}, "httpEndpoint": {}}, "config"),
        ({"openApi": {}}, "open_api.document"),
        ({"openApi": {"document": "e30=", "documentUrl": "http://a.example"}}, "open_api.document"),
        ({"openApi": {"document": "e30="}}, "open_api.document"),
        ({"openApi": {"document": "%%"}}, "config"),
        ({"openApi": {"documentUrl": "http://169.254.169.254/"}}, "open_api.document_url"),
        ({"openApi": {"document": "DOCUMENT", "operationIds": ["none"]}}, "open_api.document"),
        ({"openApi": {"document": "DOCUMENT", "baseUrl": "http://10.0.0.1"}}, "config"),
        ({"openApi": {"document": "DOCUMENT", "baseUrl": "http://a.example?x"}}, "open_api.base_url"),
        ({"openApi": {"document": "DOCUMENT", "baseUrl": "nonsense"}}, "open_api.base_url"),
    ],
)
async def test_a_document_that_cannot_be_used_is_refused(world: World, config: Any, field: str) -> None:
    text = json.dumps(config).replace("DOCUMENT", encoded(document(world.server.port, json="get")))
    with pytest.raises(InvalidField) as error:
        await world.discover(json.loads(text))
    assert error.value.metadata["field"] == field


async def test_a_document_that_cannot_be_fetched_makes_the_source_unreachable(world: World) -> None:
    for path in ("/nothing", "/breaks"):
        with pytest.raises(SourceUnreachable, match="document_url"):
            await world.discover({"openApi": {"documentUrl": world.url + path}})
    with pytest.raises(InvalidField, match=r"neither JSON nor YAML|not an object"):
        await world.discover({"openApi": {"documentUrl": f"{world.url}/page"}})
    with pytest.raises(InvalidField, match="over the limit"):
        await world.discover({"openApi": {"documentUrl": f"{world.url}/huge"}})


async def test_a_call_goes_through_the_registry_like_any_other(world: World, database_url: str, tmp_path: Path) -> None:
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
        assert outcome(fails) == "FAILED TOOL_ERROR"
        assert content(fails)["error"] == "the service answered with status 403: you said [secret]"
        world.server.answer = lambda _: Reply(breaks=True)
        assert outcome(await registry.run("breaks", {"id": "1"}, call="c")) == "UNKNOWN OUTCOME_UNKNOWN"
    assert all(asked.headers["authorization"] == SECRETS["token"] for asked in world.server.asked)


async def test_a_common_secret_goes_to_no_service_that_a_store_has_connected(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """An admin of a store says where secrets are sent: those of the deployment are of no store. I13, TOOL-4."""
    secrets = {"*": {"token": "Bearer of-the-deployment"}, "acme": {"own": "Bearer of-the-store"}}
    world.server.answer = lambda _: Reply(b"{}", headers=JSON)

    def connectors(*_: object) -> dict[str, HttpTools]:
        return {KIND: world.connector}

    async with running(database_url, tmp_path, connectors=connectors, secrets=secrets) as registry:
        for name in ("token", "own"):
            endpoint = source_pb2.HttpEndpointConfig(
                url=f"{world.url}/json", method="GET", description="Look.", secret_headers={"Authorization": name}
            )
            policies = [source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)]
            config = source_pb2.SourceConfig(name=name, http_endpoint=endpoint, policies=policies)
            await registry.sources["acme", "root"].AddSource(source_pb2.AddSourceRequest(config=config))
        failed = await registry.run("token.call", call="a")
        assert (outcome(failed), content(failed)["error"]) == (
            "FAILED TOOL_ERROR",
            "no secret named 'token' is configured",
        )
        assert outcome(await registry.run("own.call", call="b")) == "SUCCEEDED"
    assert [asked.headers["authorization"] for asked in world.server.asked] == ["Bearer of-the-store"]


async def test_a_fetched_document_does_not_say_where_secrets_go(world: World) -> None:
    """Whoever writes it, or comes to write it, would have them sent to a server that no admin has seen."""
    async with web_server(pages({})) as elsewhere:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{port}" for port in (world.server.port, elsewhere.port)])}
        connector = HttpTools(
            GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), world.connector._helper
        )
        theirs = World(world.server, connector, world.helpers)
        written = json.dumps(document(elsewhere.port, look="get")).encode()
        world.server.answer = lambda _: Reply(written, headers=JSON)
        fetched: dict[str, Any] = {"documentUrl": f"{world.url}/doc"}
        secret = {"secretHeaders": {"Authorization": "token"}}
        with pytest.raises(InvalidField, match="which the document alone names"):
            await theirs.discover({"openApi": fetched | secret})
        base = f"http://127.0.0.1:{elsewhere.port}"
        for given in (fetched, fetched | secret | {"baseUrl": base}, {"document": encoded(written)} | secret):
            assert len(await theirs.discover({"openApi": given})) == 1
