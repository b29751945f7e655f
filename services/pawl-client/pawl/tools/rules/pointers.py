"""JSON pointers and references within a JSON Schema or another document."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

# An array index. Limited to nine digits, so that Python does not parse huge integers.
_INDEX: Final = re.compile("0|[1-9][0-9]{0,8}")
_HOPS_MAX: Final = 16


def find(root: Mapping[str, Any], reference: str, *, default: Any = None) -> Any:
    """Return the target of a pointer such as `#/$defs/task`. If there is no such target, return `default`."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return default
    node: Any = root
    for part in parts(reference):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and _INDEX.fullmatch(part) and int(part) < len(node):
            node = node[int(part)]
        else:
            return default
    return node


def parts(reference: str) -> list[str]:
    """Return the unescaped segments of a reference that starts with `#/`."""
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/")]


def resolve(root: Mapping[str, Any], schema: Any) -> Any:
    """Return `schema`. If it is a `$ref`, return its target, merged with the annotations next to the `$ref`."""
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
