"""What is wrong with arguments is said whole, and how to do better. TOOL-5, LOOP-8, C14."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pawl.chassis.strict_json import dumps_canonical
from pawl.errors import InvalidSchema
from pawl.tool_registry.app.catalog.catalog import ArgumentsSchema
from pawl.tool_registry.domain.check import Accepted, Refused, check_arguments
from pawl.tool_registry.domain.definition import ARGUMENTS_BYTES_MAX, ToolDefinition
from pawl.tool_registry.domain.names import did_you_mean, near_matches
from pawl.tool_registry.domain.schema import compile_schema, weigh
from pawl.tool_registry.domain.violations import VIOLATIONS_MAX
from tests.tables import for_each

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 5},
        "priority": {"enum": ["high", "low"]},
        "count": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}},
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


def test_every_violation_is_listed_with_its_place_and_near_matches() -> None:
    found = refused(b'{"titel": "x", "priority": "hihg", "count": 12, "parts": [{"name": "a"}, {"nmae": "b"}]}')
    assert found.reason == "INVALID_ARGUMENTS"
    assert set(found.message.splitlines()[1:]) == {
        "- title: is required",
        "- titel: unknown property; did you mean 'title'?",
        '- priority: "hihg" is not one of "high" or "low"; did you mean \'high\'?',
        "- count: 12 is greater than the maximum of 9",
        "- parts[1].nmae: unknown property; did you mean 'name'?",
    }


def test_a_long_list_of_violations_is_cut_and_says_so() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    raw = ("{" + ",".join(f'"k{number}": 1' for number in range(100)) + "}").encode()
    lines = refused(raw, schema).message.splitlines()[1:]
    assert len(lines) == VIOLATIONS_MAX + 1
    assert lines[-1] == "- and more of the kind"


def test_arguments_of_a_tool_that_takes_none_are_refused() -> None:
    schema = {"type": "object", "additionalProperties": False}
    assert refused(b'{"a": 1}', schema).message.endswith("- arguments: takes no properties")


@for_each(
    "raw", [b"{", b'{"title": NaN}', b'{"title": "a", "title": "b"}', b'{"title": "\\u0000"}', b"[" * 40, b"\xff"]
)
def test_what_is_not_strict_json_is_refused_and_never_taken_for_empty(raw: bytes) -> None:
    """C14: malformed arguments were once turned into {} and executed."""
    assert refused(raw, {"type": "object"}).reason == "INVALID_JSON"


@for_each("raw", [b"[]", b'"x"', b"1", b"null"])
def test_arguments_must_be_an_object(raw: bytes) -> None:
    assert refused(raw, {"type": "object"}).reason == "INVALID_ARGUMENTS"


@for_each("raw", [b"", b"  \n", b"{}"])
def test_no_arguments_are_an_empty_object(raw: bytes) -> None:
    found = check(raw, {"type": "object", "properties": {"a": {"default": 1}}})
    assert isinstance(found, Accepted)
    assert found.canonical == b'{"a":1}'


def test_arguments_over_the_limit_are_refused_and_at_the_limit_are_not() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    frame = len(b'{"a":""}')
    fits = b'{"a":"%s"}' % (b"x" * (ARGUMENTS_BYTES_MAX - frame))
    assert isinstance(check(fits, schema), Accepted)
    assert refused(fits + b" ", schema).reason == "INVALID_ARGUMENTS"


def test_defaults_cannot_carry_arguments_over_the_limit() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"default": "y" * 1000}}}
    raw = b'{"a":"%s"}' % (b"x" * (ARGUMENTS_BYTES_MAX - 100))
    assert refused(raw, schema).reason == "INVALID_ARGUMENTS"


@for_each(
    ("schema", "said"),
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
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_with_a_sentence(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSchema, match="schema") as error:
        compile_schema(schema)
    assert said in error.value.message


def test_a_small_schema_that_grows_without_bound_is_refused() -> None:
    """One store's schema must not keep the process busy for the others."""
    doubling = {
        f"a{level}": {"allOf": [{"$ref": f"#/$defs/a{level + 1}"}, {"$ref": f"#/$defs/a{level + 1}"}]}
        for level in range(40)
    }
    schema = {"type": "object", "allOf": [{"$ref": "#/$defs/a0"}], "$defs": {**doubling, "a40": {}}}
    with pytest.raises(InvalidSchema, match="references counted"):
        compile_schema(schema)


def test_a_long_chain_of_references_is_refused() -> None:
    chain = {f"a{level}": {"$ref": f"#/$defs/a{level + 1}"} for level in range(2000)}
    with pytest.raises(InvalidSchema, match="references counted"):
        compile_schema({"type": "object", "allOf": [{"$ref": "#/$defs/a0"}], "$defs": {**chain, "a2000": {}}})


@for_each(
    "task",
    [
        {"$ref": "#tree"},
        {"$ref": "tree"},
        {"$dynamicRef": "#tree"},
        {"$id": "http://example.com/b", "$ref": "#/$defs/a"},
    ],
)
def test_growth_cannot_hide_behind_a_reference_that_is_no_pointer(task: dict[str, str]) -> None:
    """What is not followed when growth is counted would be followed when a call is checked."""
    schema = {"$id": "http://example.com/tree", "type": "object", "$anchor": "tree", "properties": {"a": task}}
    with pytest.raises(InvalidSchema, match=r"pointer|at the top"):
        compile_schema(schema)


def test_code_of_the_deployment_may_have_a_schema_that_contains_itself() -> None:
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    assert compile_schema(tree, recursion=True).is_valid({"children": [{"children": []}]})


def test_near_matches_ignore_case_and_say_nothing_when_nothing_is_near() -> None:
    assert near_matches("Calculat", ["calculate", "send_email"]) == ["calculate"]
    assert did_you_mean("xyz", ["calculate"]) == ""
    for name in ("tools/write_x", "write_x\u200b", "mcp__rig__write_x", "<|channel|>write_x<|message|>"):
        assert near_matches(name, ["write_x", "send"]) == ["write_x"], name


def test_a_schema_with_patterns_counts_as_what_it_compiles_to() -> None:
    """The versions that a process keeps are bounded by what they take, and a short pattern takes some 60 KB."""
    properties = {"a": {"type": "string", "pattern": r"\p{L}"}}
    root: dict[str, Any] = {"type": "object", "properties": properties}
    made = ArgumentsSchema(
        packed=dumps_canonical(root), weight=weigh(root), recursion=False, validator=compile_schema(root)
    )
    assert made.size * 30 > 60_000
    assert replace(made, validator=None).size == len(made.packed)
    twice = {"$defs": properties, "properties": {name: {"$ref": "#/$defs/a"} for name in "bc"}}
    assert weigh(twice) > weigh({"$defs": properties, "properties": {name: {} for name in "bc"}}) + 1
