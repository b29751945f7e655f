"""Converts an OpenAPI document's operations to tools."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urljoin

import msgspec

from pawl.errors import InvalidSchema
from pawl.tool.v1.source_pb2 import OpenApiConfig
from pawl.tool_registry.sources.http.rules.binding import (
    FORM,
    MULTIPART,
    PLACEHOLDER,
    Binding,
    Placement,
    may_be_header,
)
from pawl.tool_registry.sources.http.rules.openapi_document import Document, UnusableDocument
from pawl.tool_registry.sources.http.rules.openapi_schema import SchemaReader, describe
from pawl.tool_registry.sources.rules import DiscoveredTool, Discovery, LeftOut, registered_names, short_description
from pawl.tools.rules.definition import ToolDefinition
from pawl.tools.rules.schema import compile_schema
from pawl.values import Category, EffectClass

OPERATIONS_MAX: Final = 200
BODY: Final = "body"

_METHODS: Final = ("get", "head", "post", "put", "patch", "delete")
_NOT_IN_ARGUMENTS: Final = re.compile(r"[^A-Za-z0-9_.-]")
_ARGUMENT_CHARACTERS_MAX: Final = 64
_PATH: Final = re.compile(r"/[^?#\\\s]*(\?[^?#\\\s]*)?")
_JSON: Final = re.compile(r"application/([^*]+\+)?json", re.IGNORECASE)
_JSON_RANGE: Final = re.compile(r"\*/\*|application/(\*|\*\+json)", re.IGNORECASE)
_BODIES: Final = (_JSON, _JSON_RANGE, re.compile(re.escape(FORM), re.IGNORECASE), re.compile(MULTIPART, re.IGNORECASE))
_STYLES: Final = {
    "path": {"simple"},
    "query": {"form", "deepObject"},
    "header": {"simple"},
}
_DEFAULT_STYLE: Final = {"path": "simple", "query": "form", "header": "simple"}
# The specification says that parameters with these names are ignored.
_NO_PARAMETERS: Final = frozenset({"accept", "content-type", "authorization"})
_IDEMPOTENCY: Final = "idempotency-key"


def read_operations(document: Document, source_name: str, config: OpenApiConfig) -> Discovery:
    """Return a tool for each operation, sorted by name, and the operations that cannot become tools.

    All tools are AT_MOST_ONCE and SENSITIVE (or DESTRUCTIVE for DELETE), because the document is not trusted.

    Raises:
        UnusableDocument: The document has no operations, has too many, or lacks a chosen operation.
    """
    tools: dict[str, DiscoveredTool] = {}
    left_out: list[LeftOut] = []
    operations = chosen_operations(document, config.operation_ids)
    names = registered_names(source_name, [operation.id for operation in operations])
    for operation in operations:
        try:
            name = names[operation.id]
            if name in tools:
                raise UnusableDocument(f"two operations are named {operation.id[:100]!r}")
            tools[name] = _tool(document, name, config, operation)
        except (UnusableDocument, InvalidSchema) as error:
            left_out.append(LeftOut(name=operation.id, reason=str(error)))
    return Discovery(tools=[tools[name] for name in sorted(tools)], left_out=left_out)


def chosen_operations(document: Document, operation_ids: Collection[str]) -> list[Operation]:
    chosen: list[Operation] = []
    missing = dict.fromkeys(operation_ids)
    for operation in _operations(document):
        if not operation_ids or operation.id in operation_ids:
            missing.pop(operation.id, None)
            chosen.append(operation)
    if missing:
        raise UnusableDocument(f"no such operation: {', '.join(map(repr, list(missing)[:5]))}")
    if not chosen:
        raise UnusableDocument("there are no operations")
    if len(chosen) > OPERATIONS_MAX:
        raise UnusableDocument(f"there are {len(chosen)} operations, over the limit of {OPERATIONS_MAX}; choose fewer")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    id: str
    method: str
    path: str
    item: Mapping[str, Any]
    content: Mapping[str, Any]


def _operations(document: Document) -> Iterator[Operation]:
    paths = document.root.get("paths")
    for path, value in paths.items() if isinstance(paths, Mapping) else ():
        item = document.follow(value)
        for method in _METHODS:
            content = item.get(method)
            if isinstance(content, Mapping):
                named = content.get("operationId")
                name = named if isinstance(named, str) and named else f"{method} {path}"
                yield Operation(id=name, method=method.upper(), path=path, item=item, content=content)


def _tool(document: Document, name: str, config: OpenApiConfig, operation: Operation) -> DiscoveredTool:
    arguments = _Arguments(document, config, operation)
    binding = Binding(
        method=operation.method,
        url=_base_url(document, config, operation).rstrip("/") + operation.path,
        placements=arguments.placements,
        body_argument=arguments.body_argument,
        body_type=arguments.body_type,
        body_fields=arguments.body_fields,
        headers=dict(config.headers),
        secret_headers=dict(config.secret_headers),
        idempotency_header=arguments.idempotency_header,
    )
    if not _PATH.fullmatch(operation.path):
        # Without a leading slash, it would become part of the host.
        raise UnusableDocument("its path does not have the form /path or /path?query")
    gaps = set(PLACEHOLDER.findall(operation.path))
    if gaps - {placement.name for placement in arguments.placements if placement.place == "path"}:
        raise UnusableDocument("a placeholder in the path has no parameter")
    definition = ToolDefinition(
        name=name,
        description=_description(operation),
        arguments_schema=arguments.schema(),
        category=Category.DESTRUCTIVE if operation.method == "DELETE" else Category.SENSITIVE,
        effect=EffectClass.AT_MOST_ONCE,
    )
    return DiscoveredTool(definition=definition, binding=msgspec.json.encode(binding))


class _Arguments:
    def __init__(self, document: Document, config: OpenApiConfig, operation: Operation) -> None:
        self.placements: list[Placement] = []
        self.body_argument = ""
        self.body_type = "application/json"
        self.body_fields: list[Placement] = []
        self.idempotency_header = ""
        self._properties: dict[str, Any] = {}
        self._required: list[str] = []
        self._reader = SchemaReader(document)
        self._document = document
        self._fixed = {name.lower() for name in (*config.headers, *config.secret_headers)}
        for parameter in _parameters(document, operation):
            self._add(parameter)
        if operation.method in {"POST", "PUT", "PATCH", "DELETE"}:
            self._add_body(operation.content.get("requestBody"))

    def schema(self) -> dict[str, Any]:
        """Return the arguments schema. If the body is too complex, the schema accepts any value for it.

        Raises:
            InvalidSchema: The parameters are too complex.
        """
        schema = self._schema(self._properties)
        try:
            compile_schema(schema)
        except InvalidSchema:
            if not self.body_argument:
                raise
            loose = {"description": "Too complex to be described here; see the service's documentation."}
            schema = self._schema(self._properties | {self.body_argument: loose})
            schema.pop("$defs", None)
            compile_schema(schema)
        return schema

    def _schema(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "properties": dict(properties), "additionalProperties": False}
        if self._required:
            schema["required"] = self._required
        if self._reader.definitions:
            schema["$defs"] = self._reader.definitions
        return schema

    def _add(self, parameter: Mapping[str, Any]) -> None:
        place, name = str(parameter.get("in")), str(parameter.get("name", ""))
        is_required = place == "path" or parameter.get("required") is True
        if place == "header" and name.lower() == _IDEMPOTENCY and may_be_header(name):
            self.idempotency_header = name
            return
        if place == "header" and (name.lower() in _NO_PARAMETERS or name.lower() in self._fixed):
            return
        if place not in _STYLES or not name or (place == "header" and not may_be_header(name)):
            if is_required:
                raise UnusableDocument(f"the parameter {name[:100]!r} cannot be sent")
            return
        content = parameter.get("content")
        kinds = (
            [part for kind, part in content.items() if _JSON.fullmatch(kind)] if isinstance(content, Mapping) else []
        )
        described = kinds[0] if kinds else parameter
        schema = described.get("schema") if isinstance(described, Mapping) else None
        style = str(parameter.get("style", _DEFAULT_STYLE[place]))
        if style not in _STYLES[place]:
            raise UnusableDocument(f"the style {style!r} of {name[:100]!r} is not supported")
        argument = self._argument(name, place)
        self._properties[argument] = self._described(parameter, schema)
        if is_required:
            self._required.append(argument)
        explode = parameter.get("explode", style == "form")
        self.placements.append(
            Placement(
                argument=argument, name=name, place=place, style=style, explode=explode is True, is_json=bool(kinds)
            )
        )

    def _described(self, parameter: Mapping[str, Any], schema: Any) -> dict[str, Any]:
        read = self._reader.read(schema)
        text = describe(parameter.get("description"), schema if isinstance(schema, Mapping) else {})
        return {**read, "description": text} if text else read

    def _argument(self, name: str, place: str) -> str:
        argument = _NOT_IN_ARGUMENTS.sub("_", name)[:_ARGUMENT_CHARACTERS_MAX]
        if argument == BODY or argument in self._properties:
            argument = f"{place}_{argument}"[:_ARGUMENT_CHARACTERS_MAX]
        if argument in self._properties:
            raise UnusableDocument(f"two parameters are named {name[:100]!r}")
        return argument

    def _add_body(self, value: Any) -> None:
        if value is None:
            return
        body = self._document.follow(value)
        is_required = body.get("required") is True
        content = body.get("content")
        kinds = content if isinstance(content, Mapping) else {}
        kind = next(filter(None, (_sendable(kinds, form) for form in _BODIES)), "")
        if not kinds and not is_required:
            return
        if not kind or not isinstance(kinds[kind], Mapping):
            raise UnusableDocument("its body is neither JSON nor a form")
        self.body_argument, self.body_type = BODY, _body_type(kind)
        schema = kinds[kind].get("schema")
        if self.body_type in {FORM, MULTIPART}:
            schema = self._form(schema, kinds[kind].get("encoding"))
        try:
            self._properties[BODY] = self._described(body, schema)
        except UnusableDocument:
            self._properties[BODY] = {}
        if is_required:
            self._required.append(BODY)

    def _form(self, value: Any, encoding: Any) -> Any:
        """Return the schema of a form without its files, and record how its fields are encoded."""
        for name, given in encoding.items() if isinstance(encoding, Mapping) else ():
            if isinstance(given, Mapping) and ("style" in given or _JSON.fullmatch(str(given.get("contentType", "")))):
                style = str(given.get("style", "form"))
                explode = given.get("explode", style == "form") is True
                is_json = "style" not in given
                self.body_fields.append(
                    Placement(argument=BODY, name=name, place="body", style=style, explode=explode, is_json=is_json)
                )
        if not isinstance(value, Mapping):
            return value
        schema = self._document.follow(value)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return value
        files = {name for name, part in properties.items() if self._is_file(part)}
        required = schema.get("required")
        if isinstance(required, list) and files.intersection(filter(_is_text, required)):
            raise UnusableDocument("its body requires a file")
        if not files:
            return value
        return {**schema, "properties": {name: part for name, part in properties.items() if name not in files}}

    def _is_file(self, part: Any) -> bool:
        found = self._document.follow(part) if isinstance(part, Mapping) else {}
        items = found.get("items")
        return found.get("format") == "binary" or (isinstance(items, Mapping) and self._is_file(items))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _sendable(kinds: Mapping[str, Any], form: re.Pattern[str]) -> str:
    return next((kind for kind in kinds if form.fullmatch(kind.partition(";")[0].strip())), "")


def _body_type(kind: str) -> str:
    plain = kind.partition(";")[0].strip().lower()
    if plain in {FORM, MULTIPART}:
        return plain
    return kind if _JSON.fullmatch(plain) and kind.isascii() and kind.isprintable() else "application/json"


def _parameters(document: Document, operation: Operation) -> Iterator[Mapping[str, Any]]:
    found: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for holder in (operation.item, operation.content):
        given = holder.get("parameters")
        for value in given if isinstance(given, list) else ():
            parameter = document.follow(value)
            found[str(parameter.get("in")), str(parameter.get("name"))] = parameter
    return iter(found.values())


def _base_url(document: Document, config: OpenApiConfig, operation: Operation) -> str:
    if config.base_url:
        return config.base_url
    for holder in (operation.content, operation.item, document.root):
        servers = holder.get("servers")
        if isinstance(servers, list) and servers and isinstance(servers[0], Mapping):
            return _server(servers[0], config.document_url)
    return _server({}, config.document_url)


def _server(server: Mapping[str, Any], document_url: str) -> str:
    variables = server.get("variables")

    def value_of(match: re.Match[str]) -> str:
        variable = variables.get(match[1]) if isinstance(variables, Mapping) else None
        default = variable.get("default") if isinstance(variable, Mapping) else None
        if not isinstance(default, str):
            raise UnusableDocument("a variable of its server URL has no default; set base_url")
        return default

    url = PLACEHOLDER.sub(value_of, str(server.get("url", "/")))
    if "://" in url:
        return url
    if not document_url:
        raise UnusableDocument("the document does not list its server; set base_url")
    return urljoin(document_url, url)


def _description(operation: Operation) -> str:
    texts = [operation.content.get("summary"), operation.content.get("description")]
    parts = dict.fromkeys(text.strip() for text in texts if isinstance(text, str) and text.strip())
    text = "\n\n".join(parts) or f"{operation.method} {operation.path}"
    return short_description(text)
