"""The faults of arguments, said so that a model can do better next time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jsonschema_rs

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.rules.names import did_you_mean
from pawl.tool_registry.rules.pointers import resolve

VIOLATIONS_MAX: Final = 20
_MESSAGE_CHARACTERS_MAX: Final = 300


def list_violations(
    schema: Mapping[str, Any], validator: jsonschema_rs.Draft202012Validator, value: JsonValue
) -> list[str]:
    """Return every violation as `path: what is wrong`; empty if the value is valid.

    At most VIOLATIONS_MAX, then one line that says that there are more.
    """
    if validator.is_valid(value):
        return []
    found = (
        line for error in validator.iter_errors(value) for line in _lines(error, _properties(schema, error.schema_path))
    )
    lines = list(dict.fromkeys(itertools.islice(found, VIOLATIONS_MAX + 1)))
    return lines if len(lines) <= VIOLATIONS_MAX else [*lines[:VIOLATIONS_MAX], "and more of the kind"]


def _properties(schema: Mapping[str, Any], path: list[str | int]) -> list[str]:
    """Return the property names known where an error was found."""
    node: Any = schema
    for part in path[:-1]:
        node = resolve(schema, node)
        if isinstance(node, dict):
            node = node.get(str(part), node) if part != "$ref" else node
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
    node = resolve(schema, node)
    properties = node.get("properties") if isinstance(node, dict) else None
    return list(properties) if isinstance(properties, dict) else []


def _lines(error: jsonschema_rs.ValidationError, known: list[str]) -> Iterator[str]:
    kinds = jsonschema_rs.ValidationErrorKind
    match error.kind:
        case kinds.AdditionalProperties(unexpected=names) | kinds.UnevaluatedProperties(unexpected=names):
            for name in names:
                yield _line([*error.instance_path, name], f"unknown property{did_you_mean(name, known)}")
        case kinds.Required(property=name):
            yield _line([*error.instance_path, name], "is required")
        case kinds.Enum(options=options):
            texts = [option for option in options if isinstance(option, str)]
            near = did_you_mean(error.instance, texts) if isinstance(error.instance, str) else ""
            yield _line(error.instance_path, f"{error.message}{near}")
        case kinds.AnyOf(context=branches) | kinds.OneOfNotValid(context=branches):
            # Of an optional value, what is wrong with the value, not that it is not null.
            real = [branch for branch in branches if not _only_wants_null(branch)]
            if len(real) == 1:
                for inner in real[0]:
                    yield from _lines(inner, [])
            else:
                yield _line(error.instance_path, error.message)
        case kinds.FalseSchema() if error.schema_path[-1:] == ["additionalProperties"]:
            yield _line(error.instance_path, "takes no properties")
        case _:
            yield _line(error.instance_path, error.message)


def _only_wants_null(branch: list[jsonschema_rs.ValidationError]) -> bool:
    kind = branch[0].kind if len(branch) == 1 else None
    return isinstance(kind, jsonschema_rs.ValidationErrorKind.Type) and kind.types == ["null"]


def _line(path: list[str | int], message: str) -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "arguments"
    return f"{where}: {message}"[:_MESSAGE_CHARACTERS_MAX]
