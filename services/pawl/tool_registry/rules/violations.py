"""Near matches: what somebody may have meant by a name that does not exist."""

from __future__ import annotations

import difflib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jsonschema_rs

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.rules.pointers import resolve

_TOKEN: Final = re.compile(r"<\|[^|]*\|>")
_BEFORE: Final = ("/", ".", ":", "__")
_NEAR: Final = 0.6
_CHARACTERS_MAX: Final = 64
_KNOWN_MAX: Final = 2000
_COMPARED_MAX: Final = 8


def near_matches(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names most like `name`, best first; none for a long one.

    Of the first two thousand names only those with nearly the same letters are compared, because comparing takes long.
    """
    if len(name) > _CHARACTERS_MAX:
        return []
    by_folded = {other[:_CHARACTERS_MAX].casefold(): other for other in itertools.islice(known, _KNOWN_MAX)}
    visible = "".join(sign for sign in _TOKEN.sub("", name) if unicodedata.category(sign) != "Cf")
    folded = visible.casefold()
    # A model may put in front what it takes for a folder or a server. It is shown the dot of a source as underscores.
    ends = [other for other in by_folded if folded.endswith(tuple(sign + other.replace(".", "__") for sign in _BEFORE))]
    letters = Counter(folded)
    shared = {other: (letters & Counter(other)).total() / (len(folded) + len(other) or 1) for other in by_folded}
    likely = sorted((other for other in shared if shared[other] >= _NEAR / 2), key=lambda other: -shared[other])
    found = ends or difflib.get_close_matches(folded, likely[:_COMPARED_MAX], n=most, cutoff=_NEAR)
    return [by_folded[folded] for folded in found[:most]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'a' or 'b'?`, or an empty text where nothing is near."""
    near = near_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


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
