"""OpenAPI documents as tools, and calls as requests (TOOL-8)."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pawl.tool.v1.source_pb2 import OpenApiConfig
from pawl.tool_registry.rules.check import Accepted, check_arguments
from pawl.tool_registry.sources.http.openapi import read_operations
from pawl.tool_registry.sources.http.openapi_extract import extract, read_tools
from pawl.tool_registry.sources.http.rules.binding import (
    Binding,
    BuiltRequest,
    UnusableArgument,
    build,
    may_be_header,
    may_be_header_value,
)
from pawl.tool_registry.sources.http.rules.openapi_document import DOCUMENT_BYTES_MAX, UnusableDocument, read_document
from pawl.tool_registry.sources.rules import DiscoveredTool, LeftOut
from pawl.tools.rules.schema import compile_schema
from tests.tables import for_each

PETS = """
openapi: 3.0.3
info: {title: Pets, version: 1.0.0}
servers:
  - url: https://{region}.pets.example/{base}
    variables: {region: {default: eu}, base: {default: v1}}
paths:
  /pets:
    parameters:
      - {name: tenant, in: header, required: true, schema: {type: string}}
    get:
      operationId: listPets
      summary: List pets.
      description: All that there are.
      parameters:
        - name: limit
          in: query
          description: How many.
          schema: {type: integer, minimum: 0, exclusiveMinimum: true, default: 20}
        - {name: tags, in: query, schema: {type: array, items: {type: string}}}
        - {name: ids, in: query, explode: false, schema: {type: array, items: {type: integer}}}
        - {name: filter, in: query, style: deepObject, schema: {type: object, properties: {name: {type: string}}}}
        - {name: session, in: cookie, schema: {type: string}}
        - {name: Authorization, in: header, schema: {type: string}}
      responses: {200: {description: ok}}
    post:
      operationId: create pet!
      requestBody: {$ref: '#/components/requestBodies/Pet'}
  /pets/{id}:
    parameters:
      - $ref: '#/components/parameters/Id'
    get:
      parameters:
        - {name: id, in: query, schema: {type: boolean}}
    delete: {operationId: deletePet, summary: Delete a pet.}
    put:
      operationId: replacePhoto
      requestBody: {required: true, content: {image/png: {}}}
components:
  parameters:
    Id: {name: id, in: path, required: true, schema: {type: string, nullable: true, enum: [a, b]}}
  requestBodies:
    Pet:
      required: true
      description: The pet.
      content: {application/vnd.pets+json: {schema: {$ref: '#/components/schemas/Pet'}}}
  schemas:
    Pet:
      type: object
      required: [id, name]
      properties:
        id: {type: string, readOnly: true}
        name: {type: string, minLength: 1, example: Rex}
        born: {type: string, format: date, nullable: true}
        mother: {$ref: '#/components/schemas/Pet'}
        owner: {nullable: true, allOf: [{$ref: '#/components/schemas/Owner'}]}
    Owner:
      type: object
      properties:
        phone: {type: string, pattern: '^(?!0)\\d+$'}
        pet: {$ref: '#/components/schemas/Pet'}
"""


def read(document: Any, *operation_ids: str, **changes: Any) -> tuple[dict[str, DiscoveredTool], list[LeftOut]]:
    data = document if isinstance(document, bytes) else document.encode()
    found = read_operations(read_document(data), "pets", OpenApiConfig(operation_ids=list(operation_ids), **changes))
    for tool in found.tools:
        compile_schema(tool.definition.arguments_schema)
    return {tool.definition.name: tool for tool in found.tools}, list(found.left_out)


def one(operation: dict[str, Any], *, path: str = "/a", method: str = "post", **more: Any) -> DiscoveredTool:
    document = {
        "openapi": "3.1.0",
        "servers": [{"url": "https://a.example"}],
        "paths": {path: {method: {"operationId": "a"} | operation}},
    } | more
    tools, left_out = read(json.dumps(document))
    assert left_out == []
    (tool,) = tools.values()
    return tool


def request(tool: DiscoveredTool, arguments: dict[str, Any]) -> BuiltRequest:
    checked = check_arguments(
        tool.definition, compile_schema(tool.definition.arguments_schema), json.dumps(arguments).encode()
    )
    assert isinstance(checked, Accepted), checked
    return build(msgspec.json.decode(tool.binding, type=Binding), checked.arguments)


def test_supported_operations_become_tools_and_others_are_listed() -> None:
    tools, left_out = read(PETS)
    assert sorted(tools) == ["pets.create_pet", "pets.deletePet", "pets.get_pets_id", "pets.listPets"]
    assert left_out == [LeftOut(name="replacePhoto", reason="its body is neither JSON nor a form")]
    assert tools["pets.listPets"].definition.description == "List pets.\n\nAll that there are."
    assert tools["pets.get_pets_id"].definition.description == "GET /pets/{id}"
    harm = {name: (tool.definition.category, tool.definition.effect) for name, tool in tools.items()}
    not_safe = dict.fromkeys(tools, ("SENSITIVE", "AT_MOST_ONCE"))
    assert harm == not_safe | {"pets.deletePet": ("DESTRUCTIVE", "AT_MOST_ONCE")}


def test_parameters_become_arguments_that_are_placed_in_the_request() -> None:
    tool = read(PETS)[0]["pets.listPets"]
    schema = tool.definition.arguments_schema
    assert (schema["required"], {*schema["properties"]}) == (["tenant"], {"tenant", "limit", "tags", "ids", "filter"})
    assert schema["properties"]["limit"] == {
        "type": "integer",
        "exclusiveMinimum": 0,
        "description": "How many. (default: 20)",
    }

    built = request(
        tool,
        {"tenant": "t 1", "limit": 5, "tags": ["a b", "c&d"], "ids": [1, 2], "filter": {"name": "é"}},
    )
    assert built.url == "https://eu.pets.example/v1/pets?limit=5&tags=a%20b&tags=c%26d&ids=1,2&filter[name]=%C3%A9"
    assert (built.headers, built.body) == ({"tenant": "t 1"}, None)


def test_a_body_becomes_an_argument() -> None:
    tool = read(PETS)[0]["pets.create_pet"]
    schema = tool.definition.arguments_schema
    assert schema["properties"]["body"] == {"$ref": "#/$defs/Pet", "description": "The pet."}
    assert schema["required"] == ["tenant", "body"]
    assert schema["$defs"]["Pet"] == {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "born": {"type": ["string", "null"], "format": "date"},
            "mother": {},
            "owner": {"anyOf": [{"allOf": [{"$ref": "#/$defs/Owner"}]}, {"type": "null"}]},
        },
    }
    assert schema["$defs"]["Owner"]["properties"] == {"phone": {"type": "string"}, "pet": {}}
    built = request(tool, {"tenant": "t", "body": {"name": "Rex", "born": None, "owner": {"phone": "1"}}})
    assert json.loads(built.body or b"") == {"name": "Rex", "born": None, "owner": {"phone": "1"}}
    assert built.headers["Content-Type"] == "application/vnd.pets+json"


def test_parameters_with_the_same_name_are_separate_arguments() -> None:
    tool = read(PETS)[0]["pets.get_pets_id"]
    assert tool.definition.arguments_schema["properties"]["id"]["enum"] == ["a", "b", None]
    assert request(tool, {"id": "a", "query_id": True}).url.endswith("/pets/a?id=true")


def test_the_same_document_gives_the_same_tools_as_json_and_as_yaml() -> None:
    assert read(json.dumps(read_document(PETS.encode()).root)) == read(PETS)


def test_tool_names_are_valid_and_distinct() -> None:
    ids = ["a" * 80, "a" * 81, "x y", "x-y", "x/y", "é"]
    paths = {f"/{number}": {"get": {"operationId": name}} for number, name in enumerate(ids)}
    document: Any = {"openapi": "3.1.0", "servers": [{"url": "https://a.example"}], "paths": paths}
    names = read(json.dumps(document))[0].keys()
    assert (len(names), names >= {"pets.x_y", "pets.x-y", "pets.tool"}) == (len(ids), True)
    assert all(len(name) <= 63 and name.startswith("pets.") for name in names)


def test_openapi_3_1_schemas_are_used_unchanged() -> None:
    properties: dict[str, Any] = {
        "a": {"const": 1},
        "b": {"type": "array", "prefixItems": [{"type": "string"}], "items": False},
        "e": {"type": "integer", "exclusiveMinimum": 3},
    }
    content = {"application/json": {"schema": {"type": ["object", "null"], "properties": properties}}}
    tool = one({"requestBody": {"content": content}})
    assert tool.definition.arguments_schema["properties"]["body"]["properties"] == properties


@for_each(
    ("document", "operation_ids", "says"),
    [
        (PETS, ["deletePet", "none"], "no such operation: 'none'"),
        (
            json.dumps({"openapi": "3.1.0", "paths": {f"/{number}": {"get": {}} for number in range(201)}}),
            [],
            "201 operations, over the limit of 200",
        ),
        ('{"openapi": "3.1.0"}', [], "no operations"),
    ],
)
def test_operations_can_be_selected(document: str, operation_ids: list[str], says: str) -> None:
    assert list(read(PETS, "deletePet")[0]) == ["pets.deletePet"]
    with pytest.raises(UnusableDocument, match=says):
        read(document, *operation_ids)


def test_the_base_url_comes_from_source_operation_or_document_url() -> None:
    def url_of(**changes: Any) -> str:
        document = {"openapi": "3.1.0", "paths": {"/a": {"get": {}}}} | changes.pop("document", {})
        (tool,) = read(json.dumps(document), **changes)[0].values()
        return msgspec.json.decode(tool.binding, type=Binding).url

    relative = {"servers": [{"url": "../v2"}]}
    own = {"paths": {"/a": {"servers": [{"url": "https://c.example"}], "get": {}}}}
    rows: list[tuple[dict[str, Any], str]] = [
        ({"base_url": "https://b.example/x/"}, "https://b.example/x/a"),
        ({"document_url": "https://b.example/x/doc.json"}, "https://b.example/a"),
        ({"document_url": "https://b.example/x/doc.json", "document": relative}, "https://b.example/v2/a"),
        ({"document": own}, "https://c.example/a"),
    ]
    assert [url_of(**changes) for changes, _ in rows] == [url for _, url in rows]
    (left,) = read('{"openapi": "3.1.0", "paths": {"/a": {"get": {}}}}')[1]
    assert "set base_url" in left.reason


@for_each("path", [".evil.example/a", "@evil.example", ":8080/a", "a", "/a?b?c", "/a#b", "/a\\b", "/a b"])
def test_a_path_that_would_change_the_host_is_skipped(path: str) -> None:
    document = {"openapi": "3.1.0", "servers": [{"url": "https://a.example"}], "paths": {path: {"get": {}}}}
    tools, (left,) = read(json.dumps(document))
    assert (tools, left.reason) == ({}, "its path does not have the form /path or /path?query")


def test_an_idempotency_key_is_not_an_argument() -> None:
    tool = one({"parameters": [{"name": "Idempotency-Key", "in": "header", "required": True, "schema": {}}]})
    assert tool.definition.arguments_schema["properties"] == {}
    assert msgspec.json.decode(tool.binding, type=Binding).idempotency_header == "Idempotency-Key"


def test_a_body_with_an_oversized_schema_accepts_anything() -> None:
    properties = {f"p{number}": {"type": "string", "description": "x" * 100} for number in range(1000)}
    body = {"required": True, "content": {"application/json": {"schema": {"type": "object", "properties": properties}}}}
    tool = one({"requestBody": body})
    assert "Too complex to be described" in tool.definition.arguments_schema["properties"]["body"]["description"]
    assert request(tool, {"body": {"any": 1}}).body == b'{"any":1}'
    wide: Any = {f"S{number}": {"allOf": [{"$ref": f"#/components/schemas/S{number + 1}"}] * 9} for number in range(30)}
    tool = one(
        {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S0"}}}}},
        components={"schemas": wide | {"S30": {"type": "object"}}},
    )
    assert request(tool, {"body": [1]}).body == b"[1]"


@for_each(
    ("parameter", "value", "query"),
    [
        ({}, "a&b=c#d é", "p=a%26b%3Dc%23d%20%C3%A9"),
        ({}, True, "p=true"),
        ({}, ["a", "b c"], "p=a&p=b%20c"),
        ({"explode": False}, ["a", "b"], "p=a,b"),
        ({}, {"a": 1, "b": True}, "a=1&b=true"),
        ({"explode": False}, {"a": 1, "b": True}, "p=a,1,b,true"),
        ({"style": "deepObject", "explode": True}, {"a": "x&y"}, "p[a]=x%26y"),
    ],
)
def test_parameters_are_serialised_by_style(parameter: dict[str, Any], value: Any, query: str) -> None:
    tool = one({"parameters": [{"name": "p", "in": "query", "schema": {}} | parameter]}, method="get")
    assert request(tool, {"p": value}).url == f"https://a.example/a?{query}"


@for_each(
    ("media", "body", "sent"),
    [
        ({"application/*+json": {}}, {"a": 1}, ("application/json", b'{"a":1}')),
        ({"*/*": {}}, {"a": 1}, ("application/json", b'{"a":1}')),
        ({"application/merge-patch+json": {}}, {"a": 1}, ("application/merge-patch+json", b'{"a":1}')),
        (
            {"application/x-www-form-urlencoded": {"encoding": {"deep": {"style": "deepObject", "explode": True}}}},
            {"a": "x&y", "b": [1, True], "c": {"d": 1}, "deep": {"list": [{"price": 1}]}, "e": None},
            (
                "application/x-www-form-urlencoded",
                b"a=x%26y&b=1&b=true&c=%7B%22d%22%3A1%7D&deep[list][0][price]=1",
            ),
        ),
    ],
)
def test_a_body_is_encoded_by_its_media_type(
    media: dict[str, Any], body: dict[str, Any], sent: tuple[str, bytes]
) -> None:
    built = request(one({"requestBody": {"content": media}}), {"body": body})
    assert (built.headers["Content-Type"], built.body) == sent


def test_a_multipart_form_has_a_part_per_field_and_no_files() -> None:
    schema = {"properties": {"photo": {"type": "string", "format": "binary"}, "name": {}, "tags": {}, "pet": {}}}
    tool = one({"requestBody": {"content": {"multipart/form-data": {"schema": schema}}}})
    assert set(tool.definition.arguments_schema["properties"]["body"]["properties"]) == {"name", "tags", "pet"}
    built = request(tool, {"body": {"name": "ann", "pet": {"age": 3}}})
    kind, _, boundary = built.headers["Content-Type"].partition("; boundary=")
    assert kind == "multipart/form-data"
    assert [part.partition("\r\n")[2] for part in (built.body or b"").decode().split(f"--{boundary}")[1:-1]] == [
        'Content-Disposition: form-data; name="name"\r\n\r\nann\r\n',
        'Content-Disposition: form-data; name="pet"\r\nContent-Type: application/json\r\n\r\n{"age":3}\r\n',
    ]


def test_an_operation_with_an_unsupported_body_is_skipped() -> None:
    file = {"schema": {"required": ["f"], "properties": {"f": {"format": "binary"}}}}
    for content, reason in (({"text/csv": {}}, "neither JSON nor a form"), ({"multipart/form-data": file}, "a file")):
        paths = {"/a": {"post": {"operationId": "a", "requestBody": {"content": content}}}}
        tools, (left,) = read(
            json.dumps({"openapi": "3.1.0", "servers": [{"url": "https://a.example"}], "paths": paths})
        )
        assert (tools, reason in left.reason) == ({}, True)


@for_each("value", ["..", ".", "", None])
def test_an_argument_cannot_change_the_path(value: Any) -> None:
    parameters: Any = [{"name": "id", "in": "path", "required": True, "schema": {}}]
    tool = one({"parameters": parameters}, path="/a/{id}/b")
    with pytest.raises(UnusableArgument):
        request(tool, {"id": value})
    assert request(tool, {"id": "../x?y#z%2e"}).url == "https://a.example/a/..%2Fx%3Fy%23z%252e/b"


@for_each("value", ["a\r\nX-Other: b", " a", "", "é", "a\x7f"])
def test_an_argument_cannot_break_out_of_a_header(value: str) -> None:
    tool = one({"parameters": [{"name": "X-A", "in": "header", "schema": {"type": "string"}}]})
    with pytest.raises(UnusableArgument, match="printable ASCII"):
        request(tool, {"X-A": value})


@for_each(
    ("text", "says"),
    [
        ("", "not an object"),
        ("[]", "not an object"),
        ("{", "not JSON"),
        ("{}", "openapi"),
        ("swagger: '2.0'", "openapi"),
        ("a: [", "neither JSON nor YAML"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: !!python/object/apply:os.system [id]", "neither JSON nor YAML"),
        ("a: " + "[" * 200, "levels deep"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "levels deep"),
        ('{"a": ' + "[" * 100_000, "not JSON"),
        ("#" * (DOCUMENT_BYTES_MAX + 1), "over the limit of"),
    ],
)
def test_an_unusable_document_is_refused(text: str, says: str) -> None:
    with pytest.raises(UnusableDocument, match=says):
        read_document(text.encode())


@for_each("target", ["https://evil.example/x", "other.yaml#/a", "#/nowhere", "#/components/schemas/A"])
def test_external_dangling_and_circular_references_are_not_followed(target: str) -> None:
    paths = {"/a": {"get": {"operationId": "a", "parameters": [{"$ref": target}]}}}
    components = {"schemas": {"A": {"$ref": "#/components/schemas/A"}}}
    document = {"openapi": "3.1.0", "servers": [{"url": "https://a.example"}], "paths": paths, "components": components}
    tools, (left,) = read(json.dumps(document))
    assert (tools, left.name) == ({}, "a")


def test_yaml_values_are_read_like_the_same_json() -> None:
    assert read_document(b"openapi: 3.0.0\na: 2020-01-01\nb: no\nc: true\n200: x\nd: 1.5\ne: ~\nf: 1\n").root == {
        "openapi": "3.0.0",
        "a": "2020-01-01",
        "b": "no",
        "c": True,
        "200": "x",
        "d": 1.5,
        "e": None,
        "f": 1,
    }


EVERYTHING: dict[str, Any] = {
    "openapi": "3.1.0",
    "servers": [{"url": "https://{h}.example", "variables": {"h": {"default": "a"}}}],
    "tags": ["t"],
    "paths": {
        "/a/{id}": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string", "enum": ["a"]}}],
            "post": {
                "operationId": "p",
                "summary": "s",
                "parameters": [
                    {"name": "q", "in": "query", "style": "form", "explode": True, "schema": {"type": "array"}},
                    {"$ref": "#/components/parameters/P"},
                    {"name": "h", "in": "header", "content": {"application/json": {"schema": {"type": "object"}}}},
                ],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S"}}}},
            },
        }
    },
    "components": {
        "parameters": {"P": {"name": "p", "in": "query", "schema": {"type": "integer"}}},
        "schemas": {
            "S": {
                "type": ["object", "null"],
                "required": ["a"],
                "properties": {
                    "a": {"type": "string", "readOnly": True, "default": "x"},
                    "c": {"oneOf": [{"minimum": 1}]},
                },
                "additionalProperties": {"pattern": "^a"},
            }
        },
    },
}
ODD: tuple[Any, ...] = (None, 5, "x", [], {}, [[1]], [{"a": 1}], {"$ref": 5}, {"$ref": f"#/tags/{'9' * 5000}"})


def paths_in(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*above, key)
        yield from paths_in(part, (*above, key))


@for_each("version", ["3.0.3", "3.1.0"])
@for_each("part", sorted(EVERYTHING.keys() - {"openapi"}))
def test_any_value_anywhere_in_a_document_is_read_or_refused(version: str, part: str) -> None:
    for place in paths_in(EVERYTHING[part], (part,)):
        for odd in ODD:
            document = copy.deepcopy(EVERYTHING | {"openapi": version})
            holder = functools.reduce(lambda found, key: found[key], place[:-1], document)
            holder[place[-1]] = odd
            data = json.dumps(document).encode()
            for reading in (lambda: read_tools(data, "pets", OpenApiConfig()), lambda: extract(data, ("p",))):  # noqa: B023  # now
                with contextlib.suppress(UnusableDocument):
                    reading()


def test_source_and_connection_headers_are_not_arguments() -> None:
    parameters: Any = [
        {"name": name, "in": "header", "schema": {}} for name in ("X-Key", "X-TENANT", "X-Other", "Host")
    ]
    operation = {"get": {"parameters": parameters}}
    document = {"openapi": "3.1.0", "servers": [{"url": "https://a.example"}], "paths": {"/a": operation}}
    (tool,) = read(json.dumps(document), headers={"x-tenant": "1"}, secret_headers={"x-key": "key"})[0].values()
    assert list(tool.definition.arguments_schema["properties"]) == ["X-Other"]
    binding = msgspec.json.decode(tool.binding, type=Binding)
    assert (binding.headers, binding.secret_headers) == ({"x-tenant": "1"}, {"x-key": "key"})
    for name in ("Host", "content-length", "Transfer-Encoding", "Proxy-Authorization", "a b", "a:", "", "é"):
        assert not may_be_header(name), name
    assert may_be_header("Authorization")
    assert may_be_header_value("Bearer abc")
    assert not may_be_header_value("abc\n")


def large_document(operations: int = 300) -> dict[str, Any]:
    """Return a document over the size limit, in which each operation needs only a small part."""
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
    servers = [{"url": "https://a.example"}]
    return {"openapi": "3.0.0", "servers": servers, "paths": paths, "components": {"schemas": schemas}}


def test_only_selected_operations_in_a_large_document_are_kept() -> None:
    whole = json.dumps(large_document()).encode()
    kept = extract(whole, ("op0", "op250"))
    assert list(json.loads(kept)["paths"]) == ["/0", "/250", "/7"]
    assert set(json.loads(kept)["components"]["schemas"]) == {"S0", "T0", "S250", "T250"}
    tools, _ = read(kept, "op0", "op250")
    assert tools["pets.op250"].definition.arguments_schema["$defs"]["T250"] == {"type": "string", "maxLength": 251}
    with pytest.raises(UnusableDocument, match="over the limit of 200; choose fewer"):
        read(whole)
