"""References inside a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

_HOPS_MAX: Final = 16


def find(root: Mapping[str, Any], reference: str) -> Any:
    """Return what a reference like `#/$defs/task` points at, or None; others are not followed."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    node: Any = root
    for raw in reference[2:].split("/"):
        part = unquote(raw).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node


def resolve(root: Mapping[str, Any], schema: Any) -> Any:
    """Return `schema`, or what it refers to if it is a bare reference (annotations aside)."""
    for _ in range(_HOPS_MAX):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        target = find(root, reference)
        if not isinstance(target, dict):
            return schema
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = target | beside
    return schema
