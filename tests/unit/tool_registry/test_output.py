"""Answers beside the schema that was asked for."""

from __future__ import annotations

import json
from typing import Any

from pawl.tool_registry.domain.output import check_output, output_schema_problem
from tests.tables import for_each

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "number"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_what_fits_is_given_in_its_canonical_form() -> None:
    assert check_output(packed(SCHEMA), b' {"degrees": 3, "city": "Oslo"}') == (b'{"city":"Oslo","degrees":3}', [])


@for_each(
    ("answer", "faults"),
    [
        (b'{"city": "Oslo"}', ["degrees: is required"]),
        (b'{"city": "Oslo", "degrees": "3"}', ['degrees: "3" is not of type "number"']),
        (b'{"city": "Oslo", "degrees": 3, "cty": 1}', ["cty: unknown property, did you mean 'city'?"]),
        (b"[]", ['answer: [] is not of type "object"']),
    ],
)
def test_everything_that_is_wrong_is_said(answer: bytes, faults: list[str]) -> None:
    """Nothing is coerced: what people were shown is the answer."""
    found = check_output(packed(SCHEMA), answer)
    assert found[0] == b""
    assert [fault.partition(":")[0] for fault in found[1]] == [fault.partition(":")[0] for fault in faults]


@for_each("answer", [b"It is 3 degrees.", b"", b'{"city": "Oslo", "city": "Bergen"}', b"NaN", b'{"a":'])
def test_what_is_no_strict_json_is_a_fault(answer: bytes) -> None:
    output_json, (fault,) = check_output(packed(SCHEMA), answer)
    assert (output_json, fault.startswith("answer: is not JSON")) == (b"", True)


def test_an_answer_has_a_limit() -> None:
    _, (fault,) = check_output(packed(SCHEMA), b'"' + b"x" * 256 * 1024 + b'"')
    assert "the limit is 262144" in fault


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
        (packed({"type": "object", "title": "x" * 70_000}), "the limit is 65536"),
    ],
)
def test_a_schema_is_held_to_what_tools_are_held_to(schema: bytes, part: str) -> None:
    assert part in output_schema_problem(schema)
    assert part in check_output(schema, b"{}")[1][0]
    assert output_schema_problem(packed(SCHEMA)) == ""
