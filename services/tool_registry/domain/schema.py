"""JSON Schema 2020-12 of arguments: accepted or refused, and compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jsonschema_rs

from services.chassis.strict_json import dumps_canonical
from services.errors import InvalidJson, InvalidSchema
from services.tool_registry.domain.pointers import find

SCHEMA_BYTES_MAX: Final = 64 * 1024
EXPANDED_NODES_MAX: Final = 5000
EXPANDED_DEPTH_MAX: Final = 96

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SENTENCE_CHARACTERS_MAX: Final = 300
_OTHER_WAYS_TO_REFER: Final = ("$dynamicRef", "$recursiveRef")


def compile_schema(schema: Mapping[str, Any], *, recursion: bool = False) -> jsonschema_rs.Draft202012Validator:
    """Return the validator of an object schema.

    Remote references are never fetched and patterns take linear time. References
    may repeat a part, but not make it grow beyond EXPANDED_NODES_MAX, and without
    `recursion` neither contain themselves nor refer by anything but a pointer
    (`#/$defs/task`), so that checking a call takes bounded time: only code that
    the deployment trusts gets `recursion`.

    Raises:
        InvalidSchema: with a sentence that says where and why.
    """
    _check_shape(schema)
    root = dict(schema)
    _check_growth(root, recursion=recursion)
    try:
        return jsonschema_rs.Draft202012Validator(
            root,
            offline=True,
            validate_formats=True,
            ignore_unknown_formats=True,
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise InvalidSchema(f"the arguments schema is not valid: {_sentence(error)}") from None


def _check_shape(schema: Mapping[str, Any]) -> None:
    try:
        size = len(dumps_canonical(dict(schema)))
    except InvalidJson as error:
        raise InvalidSchema(f"the arguments schema is not strict JSON: {error.message}") from None
    if size > SCHEMA_BYTES_MAX:
        raise InvalidSchema(f"the arguments schema has {size} bytes, the limit is {SCHEMA_BYTES_MAX}")
    if schema.get("type") != "object":
        raise InvalidSchema('the arguments schema must have "type": "object"')
    dialect = schema.get("$schema", _DIALECT)
    if not isinstance(dialect, str) or dialect.rstrip("#") != _DIALECT:
        raise InvalidSchema(f'"$schema" must be {_DIALECT}')


def _check_growth(root: dict[str, Any], *, recursion: bool) -> None:
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size_of(node: Any) -> int:
        if not isinstance(node, dict | list):
            return 0
        if len(open_nodes) > EXPANDED_DEPTH_MAX:
            raise InvalidSchema(f"the arguments schema is deeper than {EXPANDED_DEPTH_MAX}, references counted")
        if id(node) in open_nodes:
            if recursion:
                return 0
            raise InvalidSchema("the arguments schema contains itself through a reference")
        if id(node) not in sizes:
            open_nodes.add(id(node))
            children = node.values() if isinstance(node, dict) else node
            if not recursion and isinstance(node, dict):
                _check_references(node, is_root=node is root)
            size = 1 + sum(size_of(child) for child in children)
            target = node.get("$ref") if isinstance(node, dict) else None
            if isinstance(target, str):
                size += size_of(find(root, target))
            open_nodes.discard(id(node))
            if size > EXPANDED_NODES_MAX:
                raise InvalidSchema(
                    f"the arguments schema has more than {EXPANDED_NODES_MAX} parts, references counted"
                )
            sizes[id(node)] = size
        return sizes[id(node)]

    size_of(root)


def _check_references(node: Mapping[str, Any], *, is_root: bool) -> None:
    """Refuse what makes a reference mean something else than the pointer that is followed when growth is counted."""
    target = node.get("$ref")
    if isinstance(target, str) and target != "#" and not target.startswith("#/"):
        kind = "anchors" if target.startswith("#") else "remote references"
        cut = target[:_SENTENCE_CHARACTERS_MAX]
        raise InvalidSchema(f"{kind} are not allowed in the arguments schema, only pointers like #/$defs/task: {cut!r}")
    for keyword in _OTHER_WAYS_TO_REFER:
        if isinstance(node.get(keyword), str):
            raise InvalidSchema(f"{keyword} is not allowed in the arguments schema, only $ref with a pointer")
    if isinstance(node.get("$id"), str) and not is_root:
        raise InvalidSchema("the arguments schema may have an $id at the top only")


def _sentence(error: Exception) -> str:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return str(error)[:_SENTENCE_CHARACTERS_MAX]
    where = "".join(f"/{part}" for part in error.instance_path)
    text = error.message[:_SENTENCE_CHARACTERS_MAX]
    if "Retrieval is disabled" in text:
        text = f"remote references are not allowed ({text.partition(' is not present')[0]})"
    return f"{text} (at {where})" if where else text
