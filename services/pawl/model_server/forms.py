"""JSON that fits a schema, made up as simply as may be."""

from __future__ import annotations

from typing import Any

_DEPTH_MAX = 16


def filled(schema: Any, text: str, depth: int = _DEPTH_MAX) -> Any:
    """Return a value with all that the schema names, and `text` for each text. References are not followed."""
    if not isinstance(schema, dict) or not depth:
        return text
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return filled(schema["anyOf"][0], text, depth - 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) and kind else kind:
        case "object":
            return {name: filled(value, text, depth - 1) for name, value in schema.get("properties", {}).items()}
        case "array":
            return [filled(schema.get("items"), text, depth - 1)] * int(schema.get("minItems", 0))
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
    return text[: schema.get("maxLength")]
