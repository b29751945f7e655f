"""Converts OpenAPI schemas to JSON Schema 2020-12."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pawl.errors import InvalidSchema
from pawl.tool_registry.sources.http.rules.openapi_document import Document, UnusableDocument
from pawl.tools.rules.schema import EXPANDED_NODES_MAX, compile_schema

_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_SCHEMAS: Final = ("items", "additionalProperties", "not")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_DEFAULT_CHARACTERS_MAX: Final = 100
_KEYWORDS: Final = (
    *("minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("enum", "uniqueItems", "format", "pattern"),
)
_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9_.-]")


class SchemaReader:
    """Converts the schemas of one operation, and collects referenced schemas in `definitions`.

    Only types, limits and structure are converted. Everything else (such as examples, XML, discriminators and
    conditions) is omitted, because the service validates its input anyway. A recursive reference becomes a schema
    without constraints.

    Raises:
        UnusableDocument: A reference is missing or external, or the schemas are too large.
    """

    def __init__(self, document: Document) -> None:
        self.definitions: dict[str, Any] = {}
        self._document = document
        self._names: dict[str, str] = {}
        self._open: set[str] = set()
        self._nodes = 0

    def read(self, schema: Any) -> dict[str, Any]:
        self._nodes += 1
        if self._nodes > EXPANDED_NODES_MAX:
            raise UnusableDocument("a schema is too large")
        if not isinstance(schema, Mapping):
            return {"not": {}} if schema is False else {}
        target = schema.get("$ref")
        if isinstance(target, str):
            referred = self._refer(target)
            # In 3.0, a reference's siblings are ignored.
            text = None if self._document.is_old else schema.get("description")
            return {"description": text} | referred if isinstance(text, str) else referred
        found = self._limits(schema)
        for keyword in _SCHEMAS:
            if isinstance(schema.get(keyword), Mapping | bool):
                value = schema[keyword]
                found[keyword] = value if isinstance(value, bool) else self.read(value)
        for keyword in _LISTS:
            value = schema.get(keyword)
            if isinstance(value, list) and value:
                found[keyword] = [self.read(item) for item in value]
        self._add_properties(schema, found)
        return self._with_null(schema, found)

    def _refer(self, target: str) -> dict[str, Any]:
        if target in self._open:
            return {}
        name = self._names.get(target)
        if name is None:
            name = _NOT_IN_NAMES.sub("_", target.rpartition("/")[2])[:64] or "part"
            while name in self._names.values():
                name += "_"
            self._names[target] = name
            self._open.add(target)
            self.definitions[name] = self.read(self._document.find(target))
            self._open.discard(target)
        return {"$ref": f"#/$defs/{name}"}

    def _limits(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        kinds = schema.get("type")
        named = [
            kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str) and kind in _TYPES
        ]
        if named:
            found["type"] = named if isinstance(kinds, list) else named[0]
        found |= {
            keyword: schema[keyword]
            for keyword in _KEYWORDS
            if keyword in schema and _is_usable(keyword, schema[keyword])
        }
        for keyword, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if schema.get(keyword) is True and limit in found:
                # In 3.0, this is a boolean that makes the limit next to it exclusive.
                found[keyword] = found.pop(limit)
        if "const" in schema:
            found["const"] = schema["const"]
        if text := describe(schema.get("description"), schema):
            found["description"] = text
        return found

    def _add_properties(self, schema: Mapping[str, Any], found: dict[str, Any]) -> None:
        properties = schema.get("properties")
        given: dict[str, Any] = {}
        if isinstance(properties, Mapping):
            # Read-only properties are never sent to the service.
            given = {name: part for name, part in properties.items() if not _is_read_only(part)}
            found["properties"] = {name: self.read(part) for name, part in given.items()}
        required = schema.get("required")
        if isinstance(required, list):
            removed = properties.keys() - given.keys() if isinstance(properties, Mapping) else set()
            if names := dict.fromkeys(name for name in required if isinstance(name, str) and name not in removed):
                found["required"] = list(names)

    def _with_null(self, schema: Mapping[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        if not (self._document.is_old and schema.get("nullable") is True):
            return found
        if isinstance(found.get("type"), str):
            enum = {"enum": [*found["enum"], None]} if "enum" in found and None not in found["enum"] else {}
            return found | {"type": [found["type"], "null"]} | enum
        return {"anyOf": [found, {"type": "null"}]} if found else found


def describe(text: Any, schema: Mapping[str, Any]) -> str:
    """Return a description that mentions the schema's default, unless the default is null, a list or an object.

    The caller omits the default from the tool's schema, because it would otherwise be sent whenever there is no value.
    In many documents, the default does not even match its own schema.
    """
    words = text.strip() if isinstance(text, str) else ""
    default = schema.get("default")
    if not isinstance(default, str | int | float | bool):
        return words
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{words} (default: {shown[:_DEFAULT_CHARACTERS_MAX]})".strip()


def _is_read_only(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("readOnly") is True


def _is_usable(keyword: str, value: Any) -> bool:
    """Return whether a keyword's value is valid and can be checked in linear time. The service checks the rest."""
    try:
        compile_schema({"type": "object", "properties": {"a": {keyword: value}}})
    except InvalidSchema:
        return False
    return bool(value != [])
