"""Arguments are made to fit without losing anything. TOOL-5."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.tool_registry.domain.check import Accepted, check_arguments
from pawl.tool_registry.domain.definition import ToolDefinition
from pawl.tool_registry.domain.fitting import fit
from pawl.tool_registry.domain.schema import compile_schema
from tests.tables import for_each


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
def test_what_can_be_read_only_one_way_is_read_that_way(schema: dict[str, Any], written: Any, read: Any) -> None:
    fitted = one(schema, written)
    assert fitted == read
    assert type(fitted) is type(read)


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
def test_what_would_lose_something_is_left_alone(schema: dict[str, Any], written: Any) -> None:
    assert one(schema, written) == written
    assert type(one(schema, written)) is type(written)


def test_each_change_is_reported_with_its_place() -> None:
    schema = {
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/item"}}},
        "$defs": {"item": {"type": "object", "properties": {"count": {"type": "integer"}}}},
    }
    fitted = fit(schema, {"items": [{"count": 1}, {"count": "2"}]})
    assert fitted.adjustments == ('items[1].count: "2" was read as 2',)


def test_defaults_are_filled_in_at_every_level_also_through_references() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"default": 1}, "b": {"$ref": "#/$defs/b"}, "c": {"$ref": "#/$defs/c"}},
        "$defs": {"b": {"type": "object", "properties": {"deep": {"default": "x"}}}, "c": {"default": [1]}},
    }
    assert fit(schema, {"b": {}}).value == {"a": 1, "b": {"deep": "x"}, "c": [1]}


def test_a_default_that_would_make_valid_arguments_invalid_is_left_out() -> None:
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


@given(value=st.dictionaries(st.text(st.characters(codec="utf-8", exclude_characters="\0")), JSON, max_size=4))
def test_canonical_arguments_are_a_fixed_point(value: dict[str, Any]) -> None:
    """What was checked once is the same when it is checked again before it runs."""
    schema = {"type": "object"}
    definition = ToolDefinition(name="t", description="d", arguments_schema=schema)
    validator = compile_schema(schema)
    first = check_arguments(definition, validator, dumps_canonical(value))
    assert isinstance(first, Accepted)
    again = check_arguments(definition, validator, first.canonical)
    assert isinstance(again, Accepted)
    assert again.canonical == first.canonical
    assert again.note == ""
    assert loads(first.canonical, bytes_max=10**6) == first.arguments
