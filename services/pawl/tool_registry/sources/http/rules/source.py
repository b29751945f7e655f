"""The configuration of an HTTP service by its store: its OpenAPI document, or a single endpoint.

`Source.config` of the kind `http` is the JSON form of a `pawl.tool.v1.SourceConfig`
with one of these keys; others of the message may be there and are not read. Bytes
are in base64, as protobuf's JSON has them.

    {"openApi": {"document": "e30=", "documentUrl": "", "baseUrl": "", "headers": {},
                 "secretHeaders": {"Authorization": "name-of-secret"}, "operationIds": []}}

    {"httpEndpoint": {"url": "https://a.example/orders/{id}", "method": "POST", "description": "",
                      "argumentsSchemaJson": "e30=", "headers": {}, "secretHeaders": {},
                      "idempotencyHeader": ""}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pawl.chassis.egress.policy import EgressRefused, read_target
from pawl.chassis.strict_json import JsonValue, loads
from pawl.errors import InvalidField, InvalidJson, TooLarge
from pawl.tool_registry.rules.definition import ToolDefinition, require
from pawl.tool_registry.rules.schema import SCHEMA_BYTES_MAX, compile_schema
from pawl.tool_registry.sources.http.rules.binding import (
    METHODS,
    PLACEHOLDER,
    Binding,
    Placement,
    may_be_header,
    may_be_header_value,
)
from pawl.tool_registry.sources.rules import DiscoveredTool, Source
from pawl.values import Category, EffectClass

HEADERS_MAX: Final = 32
SECRET_NAME_CHARACTERS_MAX: Final = 256

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


class OpenApi(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """OpenApiConfig."""

    document: bytes = b""
    document_url: str = ""
    """The address of the document, which its servers may be relative to."""
    base_url: str = ""
    headers: dict[str, str] = {}
    secret_headers: dict[str, str] = {}
    operation_ids: list[str] = []


class HttpEndpoint(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """HttpEndpointConfig."""

    url: str = ""
    method: str = ""
    description: str = ""
    arguments_schema_json: bytes = b""
    headers: dict[str, str] = {}
    secret_headers: dict[str, str] = {}
    idempotency_header: str = ""


class _Config(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    open_api: OpenApi | None = None
    http_endpoint: HttpEndpoint | None = None


def read_config(source: Source) -> OpenApi | HttpEndpoint:
    """Return the configuration of a source; its headers are fit to be sent.

    Raises:
        InvalidField: it cannot be used.
    """
    try:
        config = msgspec.json.decode(source.config, type=_Config)
    except msgspec.DecodeError as error:
        raise InvalidField(f"config: {error}", field="config") from None
    if config.open_api is not None and config.http_endpoint is None:
        document = config.open_api
        require(
            bool(document.document) != bool(document.document_url),
            "open_api.document",
            "give the document or its URL, and not both",
        )
        check_headers("open_api", document.headers, document.secret_headers)
        return document
    if config.http_endpoint is not None and config.open_api is None:
        endpoint = config.http_endpoint
        check_headers("http_endpoint", endpoint.headers, endpoint.secret_headers)
        return endpoint
    raise InvalidField("config: must have either open_api or http_endpoint", field="config")


def check_headers(field: str, headers: Mapping[str, str], secret_headers: Mapping[str, str]) -> None:
    """Return if a source may send these headers.

    Raises:
        InvalidField: it may not.
    """
    names = [*headers, *secret_headers]
    require(len(names) <= HEADERS_MAX, f"{field}.headers", f"at most {HEADERS_MAX}, secret ones included")
    require(len({name.lower() for name in names}) == len(names), f"{field}.headers", "a name comes twice")
    for name in headers:
        require(may_be_header(name), f"{field}.headers", f"{name[:100]!r} cannot be set")
        require(may_be_header_value(headers[name]), f"{field}.headers", f"{name}: must be printable ASCII")
    for name, secret in secret_headers.items():
        require(may_be_header(name), f"{field}.secret_headers", f"{name[:100]!r} cannot be set")
        require(
            1 <= len(secret) <= SECRET_NAME_CHARACTERS_MAX, f"{field}.secret_headers", f"{name}: must name a secret"
        )


def check_base_url(field: str, url: str) -> None:
    """Return if paths can be put after a URL.

    Raises:
        InvalidField: they cannot.
    """
    require("?" not in url and "#" not in url, field, "must not have a query or a fragment")
    try:
        read_target(url)
    except EgressRefused as refused:
        raise InvalidField(f"{field}: {refused}", field=field) from None


def endpoint_tool(name: str, endpoint: HttpEndpoint) -> DiscoveredTool:
    """Return the one tool of an endpoint; SENSITIVE, or DESTRUCTIVE if it deletes, and AT_MOST_ONCE.

    Raises:
        InvalidField, InvalidSchema: the configuration cannot be used.
    """
    method = endpoint.method.upper()
    require(method in METHODS and method != "HEAD", "http_endpoint.method", "must be GET, POST, PUT, PATCH or DELETE")
    schema = _read_schema(endpoint.arguments_schema_json)
    compile_schema(schema)
    gaps = _read_gaps(endpoint.url)
    properties, required = schema.get("properties"), schema.get("required")
    for gap in gaps:
        is_there = isinstance(properties, dict) and gap in properties and isinstance(required, list) and gap in required
        require(is_there, "http_endpoint.url", f"{{{gap}}} must be a required argument")
    header = endpoint.idempotency_header
    taken = {given.lower() for given in (*endpoint.headers, *endpoint.secret_headers)}
    require(
        not header or (may_be_header(header) and header.lower() not in taken),
        "http_endpoint.idempotency_header",
        "cannot be set",
    )
    binding = Binding(
        method=method,
        url=endpoint.url,
        placements=[Placement(argument=gap, name=gap, place="path", style="simple") for gap in gaps],
        rest="body" if method in _WITH_BODY else "query",
        headers=endpoint.headers,
        secret_headers=endpoint.secret_headers,
        idempotency_header=header,
    )
    definition = ToolDefinition(
        name=f"{name}.call",
        description=endpoint.description,
        arguments_schema=schema,
        category=Category.DESTRUCTIVE if method == "DELETE" else Category.SENSITIVE,
        effect=EffectClass.AT_MOST_ONCE,
    )
    return DiscoveredTool(definition=definition, binding=msgspec.json.encode(binding))


def _read_schema(text: bytes) -> dict[str, Any]:
    field = "http_endpoint.arguments_schema_json"
    try:
        schema: JsonValue = loads(text or b'{"type": "object"}', bytes_max=SCHEMA_BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise InvalidField(f"{field}: {error.message}", field=field) from None
    if not isinstance(schema, dict):
        raise InvalidField(f"{field}: must be an object", field=field)
    return schema


def _read_gaps(url: str) -> list[str]:
    """Return the names in the gaps of a URL, each once; the host has none."""
    filled = PLACEHOLDER.sub("a", url)
    require("{" not in filled and "}" not in filled and "#" not in url, "http_endpoint.url", "is not a URL with {gaps}")
    try:
        host = read_target(filled).authority
        require(host == read_target(PLACEHOLDER.sub("b", url)).authority, "http_endpoint.url", "the host has a gap")
    except EgressRefused as refused:
        raise InvalidField(f"http_endpoint.url: {refused}", field="http_endpoint.url") from None
    return list(dict.fromkeys(PLACEHOLDER.findall(url)))
