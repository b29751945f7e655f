"""JSON that fits a schema, made up as simply as may be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEPTH_MAX = 16


def filled(schema: Mapping[str, Any], text: str) -> Any:
    """Return a value with all that the schema names, and `text` wherever it wants a text."""
    return _value(schema, schema, text, _DEPTH_MAX)


def _value(root: Mapping[str, Any], schema: Any, text: str, depth: int) -> Any:
    schema = _resolved(root, schema)
    if not isinstance(schema, dict) or not depth:
        return text
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    for name in ("enum", "examples"):
        if schema.get(name):
            return schema[name][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _value(root, schema[name][0], text, depth - 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _value(root, value, text, depth - 1) for name, value in properties.items()}
        case "array":
            count = schema.get("minItems", 0)
            return [_value(root, schema.get("items", {}), text, depth - 1)] * (count if isinstance(count, int) else 0)
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
    longest = schema.get("maxLength")
    return text[:longest] if isinstance(longest, int) else text


def _resolved(root: Mapping[str, Any], schema: Any) -> Any:
    target = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(target, str) or not target.startswith("#/"):
        return schema
    found: Any = root
    for part in target[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
