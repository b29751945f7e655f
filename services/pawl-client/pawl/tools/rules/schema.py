"""Compiles JSON Schemas (2020-12) for arguments and answers, and lists violations."""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jsonschema_rs

from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.errors import InvalidJson, InvalidSchema, TooLarge
from pawl.tools.rules.pointers import find, resolve

SCHEMA_BYTES_MAX: Final = 64 * 1024
EXPANDED_NODES_MAX: Final = 5000
EXPANDED_DEPTH_MAX: Final = 96
# Maximum number of different patterns in a schema. Once compiled, they take at most PATTERNS_MAX * PATTERN_BYTES_MAX.
PATTERNS_MAX: Final = 100
# One compiled pattern.
PATTERN_BYTES_MAX: Final = 64 * 1024

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SENTENCE_CHARACTERS_MAX: Final = 300
_OTHER_WAYS_TO_REFER: Final = ("$dynamicRef", "$recursiveRef")
# Each branch is tried several times: to check whether it matches, to list violations, and with coerced types.
_BRANCHES: Final = 4.0
_FACTORS: Final = dict.fromkeys(
    ("anyOf", "oneOf", "not", "if", "then", "else", "contains", "dependentSchemas", "propertyNames"), _BRANCHES
) | {"allOf": 2.0}
_ADDITIONS: Final = {
    "pattern": 100.0,
    "format": 100.0,
    "uniqueItems": 100.0,
    "multipleOf": 20.0,
    "unevaluatedProperties": math.inf,
    "unevaluatedItems": math.inf,
}
_NOTHING_FITS: Final = 1.5
# Weight of each name that may be missing, because a two-byte object can cause a separate error for each one.
_MISSING: Final = 2.0
_PATTERN_LIMITS: Final = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES_MAX, dfa_size_limit=PATTERN_BYTES_MAX)


def read_schema(schema_json: bytes, name: str = "the arguments schema") -> dict[str, JsonValue]:
    """Parse a schema.

    Raises:
        InvalidSchema: The schema is too large, or is not a JSON object.
    """
    try:
        schema = loads(schema_json, bytes_max=SCHEMA_BYTES_MAX)
    except TooLarge:
        raise InvalidSchema(f"{name} is {len(schema_json)} bytes, over the limit of {SCHEMA_BYTES_MAX}") from None
    except InvalidJson as error:
        raise InvalidSchema(f"{name} is not strict JSON: {error.message}") from None
    if not isinstance(schema, dict):
        raise InvalidSchema(f"{name} must be a JSON object")
    return schema


def compile_schema(schema: Mapping[str, Any], *, recursion: bool = False) -> jsonschema_rs.Draft202012Validator:
    """Compile a validator for an object schema.

    Remote references are never fetched. Patterns take linear time and at most a few MiB in total. References may repeat
    parts of the schema, but the expanded schema may have at most EXPANDED_NODES_MAX nodes. Without `recursion`,
    references must be pointers (`#/$defs/task`) and must not be recursive. Only trusted code of the deployment may use
    `recursion`.

    Checking arguments against an accepted schema can still take minutes (see `weigh`).

    Raises:
        InvalidSchema: The schema is unusable. The message contains the position and the cause.
    """
    _check_shape(schema)
    root = dict(schema)
    _check_growth(root, recursion=recursion)
    patterns = _patterns(root)
    if len(patterns) > PATTERNS_MAX:
        raise InvalidSchema(f"the arguments schema has {len(patterns)} patterns, over the limit of {PATTERNS_MAX}")
    try:
        return jsonschema_rs.Draft202012Validator(
            root,
            offline=True,
            validate_formats=True,
            ignore_unknown_formats=True,
            pattern_options=_PATTERN_LIMITS,
        )
    except (jsonschema_rs.ValidationError, ValueError) as error:
        raise InvalidSchema(f"the arguments schema is not valid: {_sentence(error)}") from None


def _patterns(root: dict[str, Any]) -> set[str]:
    found: set[str] = set()
    to_visit: list[Any] = [root]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                found.add(node["pattern"])
            if isinstance(node.get("patternProperties"), dict):
                found.update(node["patternProperties"])
            to_visit.extend(node.values())
        elif isinstance(node, list):
            to_visit.extend(node)
    return found


def _check_shape(schema: Mapping[str, Any]) -> None:
    try:
        size = len(dumps_canonical(dict(schema)))
    except InvalidJson as error:
        raise InvalidSchema(f"the arguments schema is not strict JSON: {error.message}") from None
    if size > SCHEMA_BYTES_MAX:
        raise InvalidSchema(f"the arguments schema is {size} bytes, over the limit of {SCHEMA_BYTES_MAX}")
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
            raise InvalidSchema(
                f"the arguments schema is nested more than {EXPANDED_DEPTH_MAX} levels deep, counting references"
            )
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
                    f"the arguments schema has more than {EXPANDED_NODES_MAX} parts, counting references"
                )
            sizes[id(node)] = size
        return sizes[id(node)]

    size_of(root)


def weigh(root: Mapping[str, Any]) -> float:
    """Return the worst-case work per byte of arguments, in arbitrary units.

    The result is infinite if the work can grow faster than the product of schema size and argument size.
    """
    weights: dict[int, float] = {}

    def weight_of(node: Any) -> float:
        if not isinstance(node, dict | list):
            return _NOTHING_FITS if node is False else 0.1
        if id(node) not in weights:
            weights[id(node)] = math.inf  # for recursive schemas
            weights[id(node)] = 1 + (sum(map(weight_of, node)) if isinstance(node, list) else weight_of_object(node))
        return weights[id(node)]

    def weight_of_object(node: dict[str, Any]) -> float:
        weight = 0.0
        for keyword, value in node.items():
            weight += weight_of(value) * _FACTORS.get(keyword, 1.0) + _ADDITIONS.get(keyword, 0.0)
            if keyword == "patternProperties" and isinstance(value, dict):
                weight += _ADDITIONS["pattern"] * len(value)
            elif keyword == "$ref" and isinstance(value, str):
                target = find(root, value)
                weight += weight_of(target) + (len(target) if isinstance(target, dict) else 0)
            elif keyword == "required" and isinstance(value, list) and node is not root:
                weight += _MISSING * len(value)
            elif keyword == "dependentRequired" and isinstance(value, dict):
                weight += _MISSING * sum(len(names) for names in value.values() if isinstance(names, list))
            elif keyword == "default":
                # A default occurs only once in the schema, but may be inserted many times.
                weight += len(repr(value))
        return weight

    return weight_of(root)


def _check_references(node: Mapping[str, Any], *, is_root: bool) -> None:
    """Reject references that are not pointers, because `_check_growth` cannot follow them."""
    target = node.get("$ref")
    if isinstance(target, str) and target != "#" and not target.startswith("#/"):
        kind = "anchors" if target.startswith("#") else "remote references"
        cut = target[:_SENTENCE_CHARACTERS_MAX]
        raise InvalidSchema(f"{kind} are not allowed in the arguments schema, only pointers like #/$defs/task: {cut!r}")
    for keyword in _OTHER_WAYS_TO_REFER:
        if isinstance(node.get(keyword), str):
            raise InvalidSchema(f"{keyword} is not allowed in the arguments schema, only $ref with a pointer")
    if isinstance(node.get("$id"), str) and not is_root:
        raise InvalidSchema("the arguments schema may have an $id only at the top level")


def _sentence(error: Exception) -> str:
    if not isinstance(error, jsonschema_rs.ValidationError):
        return str(error)[:_SENTENCE_CHARACTERS_MAX]
    where = "".join(f"/{part}" for part in error.instance_path)
    text = error.message[:_SENTENCE_CHARACTERS_MAX]
    if "Retrieval is disabled" in text:
        text = f"remote references are not allowed ({text.partition(' is not present')[0]})"
    return f"{text} (at {where})" if where else text


_TOKEN: Final = re.compile(r"<\|[^|]*\|>")
_BEFORE: Final = ("/", ".", ":", "__")
_NEAR: Final = 0.6
_CHARACTERS_MAX: Final = 64
_KNOWN_MAX: Final = 2000
_COMPARED_MAX: Final = 8


def near_matches(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names that are most similar to `name`, best matches first, or nothing if `name` is too long.

    Because comparisons are slow, this compares only the few names that share the most letters with `name`, chosen from
    the first two thousand.
    """
    if len(name) > _CHARACTERS_MAX:
        return []
    by_folded = {other[:_CHARACTERS_MAX].casefold(): other for other in itertools.islice(known, _KNOWN_MAX)}
    visible = "".join(sign for sign in _TOKEN.sub("", name) if unicodedata.category(sign) != "Cf")
    folded = visible.casefold()
    # A model may add a folder or server as a prefix. It sees the dot in a source tool's name as underscores.
    ends = [other for other in by_folded if folded.endswith(tuple(sign + other.replace(".", "__") for sign in _BEFORE))]
    letters = Counter(folded)
    shared = {other: (letters & Counter(other)).total() / (len(folded) + len(other) or 1) for other in by_folded}
    likely = sorted((other for other in shared if shared[other] >= _NEAR / 2), key=lambda other: -shared[other])
    found = ends or difflib.get_close_matches(folded, likely[:_COMPARED_MAX], n=most, cutoff=_NEAR)
    return [by_folded[folded] for folded in found[:most]]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'a' or 'b'?`, or an empty string if no name is similar."""
    near = near_matches(name, known)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


VIOLATIONS_MAX: Final = 20
_MESSAGE_CHARACTERS_MAX: Final = 300
_INSTANCE_CHARACTERS_MAX: Final = 100


def list_violations(
    schema: Mapping[str, Any], validator: jsonschema_rs.Draft202012Validator, value: JsonValue
) -> list[str]:
    """Return the violations, each with its path. Return nothing if the value is valid.

    Return at most VIOLATIONS_MAX violations, followed by "and more" if there are more.
    """
    if validator.is_valid(value):
        return []
    found = (line for error in validator.iter_errors(value) for line in _lines(error, _part(schema, error.schema_path)))
    lines = list(dict.fromkeys(itertools.islice(found, VIOLATIONS_MAX + 1)))
    return lines if len(lines) <= VIOLATIONS_MAX else [*lines[:VIOLATIONS_MAX], "and more"]


def _part(schema: Mapping[str, Any], path: list[str | int]) -> Mapping[str, Any]:
    """Return the subschema that contains the keyword at `path`."""
    node: Any = schema
    for part in path[:-1]:
        node = resolve(schema, node)
        if isinstance(node, dict):
            node = node.get(str(part), node) if part != "$ref" else node
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            node = node[part]
    node = resolve(schema, node)
    return node if isinstance(node, dict) else {}


def _lines(error: jsonschema_rs.ValidationError, part: Mapping[str, Any]) -> Iterator[str]:
    kinds = jsonschema_rs.ValidationErrorKind
    known, examples = (part.get(name) for name in ("properties", "examples"))
    match error.kind:
        case kinds.AdditionalProperties(unexpected=names) | kinds.UnevaluatedProperties(unexpected=names):
            for name in names:
                yield _line(
                    [*error.instance_path, name],
                    f"unknown property{did_you_mean(name, known if isinstance(known, dict) else ())}",
                )
        case kinds.Required(property=name):
            yield _line([*error.instance_path, name], "is required", between=" ")
        case kinds.Enum(options=options):
            texts = [option for option in options if isinstance(option, str)]
            near = did_you_mean(error.instance, texts) if isinstance(error.instance, str) else ""
            yield _line(error.instance_path, f"{error.message}{near}")
        case kinds.AnyOf(context=branches) | kinds.OneOfNotValid(context=branches):
            # For an optional value, report the problem with the value, not the fact that it is not null.
            real = [branch for branch in branches if not _only_wants_null(branch)]
            if len(real) == 1:
                for inner in real[0]:
                    yield from _lines(inner, {})
            else:
                yield _line(error.instance_path, error.message)
        case kinds.Pattern() if examples and isinstance(examples, list):
            shown = json.dumps(error.instance, ensure_ascii=False)[:_INSTANCE_CHARACTERS_MAX]
            yield _line(error.instance_path, f"must look like {json.dumps(examples[0])}, got {shown}")
        case kinds.FalseSchema() if error.schema_path[-1:] == ["additionalProperties"]:
            yield _line(error.instance_path, "no properties are allowed")
        case _:
            yield _line(error.instance_path, error.message)


def _only_wants_null(branch: list[jsonschema_rs.ValidationError]) -> bool:
    kind = branch[0].kind if len(branch) == 1 else None
    return isinstance(kind, jsonschema_rs.ValidationErrorKind.Type) and kind.types == ["null"]


def _line(path: list[str | int], message: str, *, between: str = ": ") -> str:
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "arguments"
    return f"{where}{between}{message}"[:_MESSAGE_CHARACTERS_MAX]


# Maximum size of a structured answer.
OUTPUT_BYTES_MAX: Final = 256 * 1024

_COMPILED_MAX: Final = 64


def output_schema_problem(schema_json: bytes) -> str:
    """Return why answers cannot be checked against a schema, or an empty string if they can."""
    try:
        _compiled(schema_json)
    except InvalidSchema as error:
        return error.message
    return ""


def check_output(schema_json: bytes, output: bytes) -> tuple[bytes, list[str]]:
    """Return an answer's canonical JSON if it matches the schema. Otherwise, return the violations.

    Users have already seen the answer, so values are not coerced and defaults are not inserted. If the schema is
    unusable, every answer fails.
    """
    try:
        schema, validator = _compiled(schema_json)
        value = loads(output, bytes_max=OUTPUT_BYTES_MAX)
    except InvalidSchema as error:
        return b"", [f"answer: {error.message}"]
    except TooLarge:
        return b"", [f"the answer is {len(output)} bytes, over the limit of {OUTPUT_BYTES_MAX}"]
    except InvalidJson as error:
        return b"", [f"the answer must be JSON without other text: {error.message}"]
    faults = list_violations(schema, validator, value)
    return (b"", [_of_answer(fault) for fault in faults]) if faults else (dumps_canonical(value), [])


def _of_answer(fault: str) -> str:
    """Reword a violation that `list_violations` attributes to arguments, so that it refers to the answer."""
    return f"answer: {fault.removeprefix('arguments: ')}" if fault.startswith("arguments: ") else fault


@functools.lru_cache(maxsize=_COMPILED_MAX)
def _compiled(schema_json: bytes) -> tuple[dict[str, Any], jsonschema_rs.Draft202012Validator]:
    schema = read_schema(schema_json, "the schema")
    try:
        return schema, compile_schema(schema)
    except InvalidSchema as error:
        raise InvalidSchema(error.message.replace("the arguments schema", "the schema")) from None
