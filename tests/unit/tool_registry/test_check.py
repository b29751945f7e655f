"""Checking arguments and answers against schemas (TOOL-5, LOOP-8, C14)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.errors import InvalidSchema
from pawl.tool_registry.catalog.catalog import ArgumentsSchema
from pawl.tool_registry.rules.check import Accepted, Refused, check_arguments
from pawl.tool_registry.rules.fitting import fit
from pawl.tools.rules.definition import ARGUMENTS_BYTES_MAX, ToolDefinition
from pawl.tools.rules.schema import (
    VIOLATIONS_MAX,
    check_output,
    compile_schema,
    did_you_mean,
    near_matches,
    output_schema_problem,
    weigh,
)
from tests.tables import for_each

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 5},
        "priority": {"enum": ["high", "low"]},
        "count": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
        "to": {"type": "string", "pattern": "@", "examples": ["ann@example.com"]},
    },
    "required": ["title"],
    "additionalProperties": False,
    "$defs": {
        "part": {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False},
    },
}


def check(raw: bytes, schema: dict[str, Any] = SCHEMA) -> Accepted | Refused:
    definition = ToolDefinition(name="make", description="d", arguments_schema=schema)
    return check_arguments(definition, compile_schema(schema), raw)


def refused(raw: bytes, schema: dict[str, Any] = SCHEMA) -> Refused:
    found = check(raw, schema)
    assert isinstance(found, Refused)
    return found


def test_every_violation_is_listed_with_its_position_and_suggestions() -> None:
    found = refused(
        b'{"titel": "x", "priority": "hihg", "count": 12, "parts": [{"name": "a"}, {"nmae": "b"}], "to": "bob"}'
    )
    assert found.reason == "INVALID_ARGUMENTS"
    assert set(found.message.splitlines()[1:]) == {
        "- title is required",
        "- titel: unknown property; did you mean 'title'?",
        '- priority: "hihg" is not one of "high" or "low"; did you mean \'high\'?',
        "- count: 12 is greater than the maximum of 9",
        '- to: must look like "ann@example.com", got "bob"',
        "- parts[1].nmae: unknown property; did you mean 'name'?",
    }


def test_a_long_list_of_violations_is_truncated_with_a_note() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    raw = ("{" + ",".join(f'"k{number}": 1' for number in range(100)) + "}").encode()
    lines = refused(raw, schema).message.splitlines()[1:]
    assert (len(lines), lines[-1]) == (VIOLATIONS_MAX + 1, "- and more")


def test_arguments_of_a_tool_that_takes_no_arguments_are_refused() -> None:
    schema = {"type": "object", "additionalProperties": False}
    assert refused(b'{"a": 1}', schema).message.endswith("- arguments: no properties are allowed")


NOT_JSON = [b"{", b'{"title": NaN}', b'{"title": "a", "title": "b"}', b'{"title": "\\u0000"}', b"[" * 40, b"\xff"]
NO_OBJECTS = [b"[]", b'"x"', b"1", b"null"]


@for_each(
    ("raw", "reason"),
    [*((raw, "INVALID_JSON") for raw in NOT_JSON), *((raw, "INVALID_ARGUMENTS") for raw in NO_OBJECTS)],
)
def test_anything_but_a_json_object_is_refused_and_never_treated_as_empty(raw: bytes, reason: str) -> None:
    """C14: malformed arguments are not executed as {}."""
    assert refused(raw, {"type": "object"}).reason == reason


@for_each("raw", [b"", b"  \n", b"{}"])
def test_missing_arguments_are_read_as_an_empty_object(raw: bytes) -> None:
    found = check(raw, {"type": "object", "properties": {"a": {"default": 1}}})
    assert isinstance(found, Accepted)
    assert found.canonical == b'{"a":1}'


def test_only_arguments_over_the_size_limit_are_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    fits = b'{"a":"%s"}' % (b"x" * (ARGUMENTS_BYTES_MAX - len(b'{"a":""}')))
    assert isinstance(check(fits, schema), Accepted)
    assert refused(fits + b" ", schema).reason == "INVALID_ARGUMENTS"


def test_defaults_cannot_push_arguments_over_the_limit() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"default": "y" * 1000}}}
    assert refused(b'{"a":"%s"}' % (b"x" * (ARGUMENTS_BYTES_MAX - 100)), schema).reason == "INVALID_ARGUMENTS"


def growing(levels: int, level: Callable[[dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next."""
    definitions = {f"a{number}": level({"$ref": f"#/$defs/a{number + 1}"}) for number in range(levels)}
    return {"type": "object", "allOf": [{"$ref": "#/$defs/a0"}], "$defs": {**definitions, f"a{levels}": {}}}


@for_each(
    ("schema", "expected"),
    [
        ({}, '"type": "object"'),
        ({"type": "array"}, '"type": "object"'),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "strin"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, "regex"),
        ({"type": "object", "properties": {"a": {"pattern": "(?=x)y"}}}, "regex"),
        ({"type": "object", "properties": {"a": {"$ref": "http://example.com/a"}}}, "remote references"),
        ({"type": "object", "properties": {"a": {"$ref": "file:///etc/passwd"}}}, "remote references"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "does not exist"),
        ({"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}, "2020-12"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, "contains itself"),
        ({"type": "object", "description": "x" * 70_000}, "limit"),
        ({"type": "object", "properties": {"a": {"const": float("nan")}}}, "strict JSON"),
        (growing(40, lambda next_one: {"allOf": [next_one, next_one]}), "counting references"),
        (growing(2000, lambda next_one: next_one), "counting references"),
    ],
)
def test_the_error_for_an_unusable_schema_gives_the_reason(schema: dict[str, Any], expected: str) -> None:
    """A small schema that grows without limit would keep the process busy for all stores."""
    with pytest.raises(InvalidSchema, match="schema") as error:
        compile_schema(schema)
    assert expected in error.value.message


@for_each(
    "task",
    [
        {"$ref": "#tree"},
        {"$ref": "tree"},
        {"$dynamicRef": "#tree"},
        {"$id": "http://example.com/b", "$ref": "#/$defs/a"},
    ],
)
def test_schema_growth_is_detected_behind_non_pointer_references(task: dict[str, str]) -> None:
    """Otherwise the growth analysis would miss references that validation follows."""
    schema = {"$id": "http://example.com/tree", "type": "object", "$anchor": "tree", "properties": {"a": task}}
    with pytest.raises(InvalidSchema, match=r"pointer|at the top"):
        compile_schema(schema)


def test_tools_of_the_deployment_may_have_recursive_schemas() -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert compile_schema(tree, recursion=True).is_valid({"children": [{"children": []}]})


def test_near_matches_ignore_case_and_decoration() -> None:
    assert near_matches("Calculat", ["calculate", "send_email"]) == ["calculate"]
    assert did_you_mean("xyz", ["calculate"]) == ""
    for name in ("tools/write_x", "write_x\u200b", "mcp__rig__write_x", "<|channel|>write_x<|message|>"):
        assert near_matches(name, ["write_x", "send"]) == ["write_x"], name


def test_a_schema_with_patterns_counts_with_its_compiled_size() -> None:
    """The total weight of cached versions is limited, and a short pattern takes about 60 KB."""
    properties = {"a": {"type": "string", "pattern": r"\p{L}"}}
    root: dict[str, Any] = {"type": "object", "properties": properties}
    made = ArgumentsSchema(
        packed=dumps_canonical(root), weight=weigh(root), recursion=False, validator=compile_schema(root)
    )
    assert made.size * 30 > 60_000
    assert replace(made, validator=None).size == len(made.packed)
    twice = {"$defs": properties, "properties": {name: {"$ref": "#/$defs/a"} for name in "bc"}}
    assert weigh(twice) > weigh({"$defs": properties, "properties": {name: {} for name in "bc"}}) + 1


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "number"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_valid_answer_is_returned_in_canonical_form() -> None:
    assert check_output(packed(WEATHER), b' {"degrees": 3, "city": "Oslo"}') == (b'{"city":"Oslo","degrees":3}', [])


@for_each(
    ("answer", "faults"),
    [
        (b'{"city": "Oslo"}', ["degrees is required"]),
        (b'{"city": "Oslo", "degrees": "3"}', ['degrees: "3" is not of type "number"']),
        (b'{"city": "Oslo", "degrees": 3, "cty": 1}', ["cty: unknown property, did you mean 'city'?"]),
        (b"[]", ['answer: [] is not of type "object"']),
    ],
)
def test_every_fault_of_an_answer_is_reported(answer: bytes, faults: list[str]) -> None:
    """Values are not converted, because the answer is shown to people."""
    output_json, found = check_output(packed(WEATHER), answer)
    assert (output_json, [fault.partition(":")[0] for fault in found]) == (
        b"",
        [each.partition(":")[0] for each in faults],
    )


@for_each(
    ("answer", "says"),
    [
        *((text, "must be JSON") for text in (b"It is 3 degrees.", b"", b"NaN", b'{"a":')),
        (b'{"city": "Oslo", "city": "Bergen"}', "must be JSON"),
        (b'"' + b"x" * 256 * 1024 + b'"', "over the limit of 262144"),
    ],
)
def test_an_answer_with_invalid_json_or_over_the_size_limit_is_a_fault(answer: bytes, says: str) -> None:
    output_json, (fault,) = check_output(packed(WEATHER), answer)
    assert (output_json, says in fault) == (b"", True)


@for_each(
    ("schema", "part"),
    [
        (b"{", "the schema is not strict JSON"),
        (b"[]", "the schema must be a JSON object"),
        (packed({"type": "string"}), 'the schema must have "type": "object"'),
        (packed({"type": "object", "$schema": "http://json-schema.org/draft-07/schema#"}), "2020-12"),
        (packed({"type": "object", "properties": {"a": {"$ref": "https://x.test/a"}}}), "remote references"),
        (packed({"type": "object", "properties": {"a": {"$ref": "#"}}}), "the schema contains itself"),
        (packed({"type": "object", "properties": {"a": {"type": "wrong"}}}), "the schema is not valid"),
        (packed({"type": "object", "title": "x" * 70_000}), "over the limit of 65536"),
    ],
)
def test_an_answer_schema_has_the_same_limits_as_tool_schemas(schema: bytes, part: str) -> None:
    assert [part in problem for problem in (output_schema_problem(schema), check_output(schema, b"{}")[1][0])] == [
        True,
        True,
    ]
    assert output_schema_problem(packed(WEATHER)) == ""


def one(schema: dict[str, Any], value: JsonValue) -> JsonValue:
    fitted = fit({"type": "object", "properties": {"x": schema}}, {"x": value}).value
    assert isinstance(fitted, dict)
    return fitted["x"]


@for_each(
    ("schema", "written", "read"),
    [
        ({"type": "integer"}, "440", 440),
        ({"type": "integer"}, " -7 ", -7),
        ({"type": "integer"}, 5.0, 5),
        ({"type": "number"}, "0.25", 0.25),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "string"}, 2024, "2024"),
        ({"type": "array", "items": {"type": "integer"}}, '["1", 2]', [1, 2]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array", "items": {"type": "string"}}, "ann", ["ann"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, '["3"]', [3]),
        ({"type": ["integer", "null"]}, "3", 3),
    ],
)
def test_unambiguous_values_are_coerced(schema: dict[str, Any], written: Any, read: Any) -> None:
    fitted = one(schema, written)
    assert (fitted, type(fitted)) == (read, type(read))


@for_each(
    ("schema", "written"),
    [
        ({"type": "integer"}, "4.5"),
        ({"type": "integer"}, "0x10"),
        ({"type": "integer"}, "007"),
        ({"type": "integer"}, "1" * 30),
        ({"type": "integer"}, 5.5),
        ({"type": "integer"}, 1e300),
        ({"type": "integer"}, "\u0661"),
        ({"type": "number"}, "0.1000000000000000055511151231257827"),
        ({"type": "number"}, "1e999"),
        ({"type": "number"}, "nan"),
        ({"type": "boolean"}, "yes"),
        ({"type": "boolean"}, 1),
        ({"type": "string"}, 1.5),
        ({"type": "string"}, True),
        ({"type": "string"}, None),
        ({"type": "array"}, "[1"),
        ({"type": "array"}, {"a": 1}),
        ({"type": "object"}, "[1]"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "maybe"),
    ],
)
def test_no_coercion_loses_information(schema: dict[str, Any], written: Any) -> None:
    fitted = one(schema, written)
    assert (fitted, type(fitted)) == (written, type(written))


def test_each_coercion_is_reported_with_its_position() -> None:
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
        "$defs": {"item": {"type": "object", "properties": {"count": {"type": "integer"}}}},
    }
    assert fit(schema, {"items": [{"count": 1}, {"count": "2"}]}).adjustments == ('items[1].count: "2" was read as 2',)


def test_defaults_are_filled_in_at_every_level() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"default": 1}, "b": {"$ref": "#/$defs/b"}, "c": {"$ref": "#/$defs/c"}},
        "$defs": {"b": {"type": "object", "properties": {"deep": {"default": "x"}}}, "c": {"default": [1]}},
    }
    assert fit(schema, {"b": {}}).value == {"a": 1, "b": {"deep": "x"}, "c": [1]}


def test_a_default_that_would_invalidate_arguments_is_skipped() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"default": 1}}, "maxProperties": 1}
    definition = ToolDefinition(name="t", description="d", arguments_schema=schema)
    checked = check_arguments(definition, compile_schema(schema), b'{"a": "x"}')
    assert isinstance(checked, Accepted)
    assert checked.arguments == {"a": "x"}


SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaf: st.SearchStrategy[dict[str, Any]] = (
        TYPES.map(lambda kind: {"type": kind})
        | st.just({})
        | st.lists(TYPES, min_size=1, unique=True).map(lambda kinds: {"type": kinds})
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
            st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"allOf": parts}),
            inner.map(lambda item: {"type": "array", "items": item}),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
                lambda properties: {"type": "object", "properties": properties}
            ),
        ),
        max_leaves=6,
    )


@given(schema=schemas(), value=st.dictionaries(st.sampled_from("abc"), JSON, max_size=3))
def test_a_valid_document_is_never_changed(schema: dict[str, Any], value: dict[str, Any]) -> None:
    root = {"type": "object", "allOf": [schema]}
    validator = compile_schema(root)
    definition = ToolDefinition(name="t", description="d", arguments_schema=root)
    checked = check_arguments(definition, validator, dumps_canonical(value))
    if validator.is_valid(value):
        assert isinstance(checked, Accepted)
        assert checked.arguments == value
    if isinstance(checked, Accepted):
        assert validator.is_valid(checked.arguments)
