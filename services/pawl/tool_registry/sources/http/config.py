"""The configuration of an HTTP service: an OpenAPI document or a single endpoint."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pawl.chassis.strict_json import JsonValue, loads
from pawl.errors import InvalidField, InvalidJson, TooLarge
from pawl.server.egress.policy import EgressRefused, read_target
from pawl.tool.v1.source_pb2 import HttpEndpointConfig, SourceConfig
from pawl.tool_registry.sources.http.rules.binding import (
    METHODS,
    PLACEHOLDER,
    Binding,
    Placement,
    check_headers,
    may_be_header,
)
from pawl.tool_registry.sources.rules import DiscoveredTool
from pawl.tools.rules.definition import ToolDefinition, require
from pawl.tools.rules.schema import SCHEMA_BYTES_MAX, compile_schema
from pawl.values import Category, EffectClass

_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})


def check_config(config: SourceConfig) -> None:
    """Validate a configuration and its headers.

    Raises:
        InvalidField: The configuration is invalid.
    """
    if config.HasField("open_api"):
        document = config.open_api
        has_one = bool(document.document) != bool(document.document_url)
        require(has_one, "open_api.document", "set either the document or its URL")
        check_headers("open_api", document.headers, document.secret_headers)
    else:
        check_headers("http_endpoint", config.http_endpoint.headers, config.http_endpoint.secret_headers)


def check_base_url(field: str, url: str) -> None:
    """Check that paths can be appended to a URL.

    Raises:
        InvalidField: Paths cannot be appended to the URL.
    """
    require("?" not in url and "#" not in url, field, "must not have a query or a fragment")
    try:
        read_target(url)
    except EgressRefused as refused:
        raise InvalidField(f"{field}: {refused}", field=field) from None


def endpoint_tool(name: str, endpoint: HttpEndpointConfig) -> DiscoveredTool:
    """Return the only tool of an endpoint, which is AT_MOST_ONCE and SENSITIVE (or DESTRUCTIVE for DELETE).

    Raises:
        InvalidField, InvalidSchema: The configuration is invalid.
    """
    method = endpoint.method.upper()
    require(method in METHODS and method != "HEAD", "http_endpoint.method", "must be GET, POST, PUT, PATCH or DELETE")
    schema = _read_schema(endpoint.arguments_schema_json)
    compile_schema(schema)
    placeholders = _placeholders(endpoint.url)
    properties, required = schema.get("properties"), schema.get("required")
    for placeholder in placeholders:
        is_declared = isinstance(properties, dict) and placeholder in properties
        is_required = isinstance(required, list) and placeholder in required
        require(is_declared and is_required, "http_endpoint.url", f"{{{placeholder}}} must be a required argument")
    header = endpoint.idempotency_header
    taken = {given.lower() for given in (*endpoint.headers, *endpoint.secret_headers)}
    require(
        not header or (may_be_header(header) and header.lower() not in taken),
        "http_endpoint.idempotency_header",
        "is not an allowed header, or is already set",
    )
    binding = Binding(
        method=method,
        url=endpoint.url,
        placements=[Placement(argument=each, name=each, place="path", style="simple") for each in placeholders],
        rest="body" if method in _WITH_BODY else "query",
        headers=dict(endpoint.headers),
        secret_headers=dict(endpoint.secret_headers),
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
        raise InvalidField(f"{field} must be an object", field=field)
    return schema


def _placeholders(url: str) -> list[str]:
    filled = PLACEHOLDER.sub("a", url)
    is_valid = "{" not in filled and "}" not in filled and "#" not in url
    require(is_valid, "http_endpoint.url", "must be a URL with optional {placeholders} and no fragment")
    try:
        host = read_target(filled).authority
        is_fixed = host == read_target(PLACEHOLDER.sub("b", url)).authority
        require(is_fixed, "http_endpoint.url", "must not have a placeholder in the host")
    except EgressRefused as refused:
        raise InvalidField(f"http_endpoint.url: {refused}", field="http_endpoint.url") from None
    return list(dict.fromkeys(PLACEHOLDER.findall(url)))
