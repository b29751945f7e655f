"""Approval gates, call digests and resource keys. HITL-2, HITL-3, LOOP-9, D8."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pawl.chassis.strict_json import JsonValue, loads
from pawl.errors import InvalidField
from pawl.tool_registry.policy.rules.gate import approval_cause, count_at, longest_array, may_be_count_path
from pawl.tool_registry.rules.definition import (
    ToolDefinition,
    check_definition,
    decode_definition,
    definition_hash,
    encode_definition,
)
from pawl.tool_registry.rules.resources import KEYS_MAX, check_template, resource_keys
from pawl.tool_registry.rules.verdict import call_digest
from pawl.values import Category, EffectClass, ExecutionContext, OfferFallback
from tests.tables import for_each

SAFE = ToolDefinition(
    name="tool",
    description="d",
    arguments_schema={"type": "object", "properties": {"path": {}, "paths": {}}},
    category=Category.SAFE,
    effect=EffectClass.IDEMPOTENT,
)


def test_only_the_longest_top_level_array_counts() -> None:
    """D8: an array in the body of a request counts at any depth."""
    assert longest_array({"a": [1], "b": [1, 2, 3, 4], "e": "text"}) == 4
    assert longest_array({"a": [1], "body": {"d": [[0] * 99]}}) == 99
    assert longest_array({}) == 0


@for_each(
    ("path", "count"),
    [
        ("$.body.orders", 2),
        ("body.orders[*].lines", 3),
        ("$.body.orders[*].lines[*]", 3),
        ("$.body.orders[*].name", 2),
        ("$.body", 1),
        ("$.body.orders.lines", 0),
        ("$.nothing[*].there", 0),
    ],
)
def test_a_count_path_counts_matching_items(path: str, count: int) -> None:
    arguments: dict[str, Any] = {
        "body": {"orders": [{"name": "a", "lines": [1, 2]}, {"name": "b", "lines": [3]}], "tags": ["x"] * 50}
    }
    assert may_be_count_path(path)
    assert count_at(arguments, path) == count


@for_each("path", ["", "$", "$.", "a..b", "[*]", "a[0]", "a.[*]", "$.a[*]b", "a" * 201])
def test_an_invalid_count_path_is_refused(path: str) -> None:
    assert not may_be_count_path(path)


def test_every_part_of_a_call_changes_its_digest() -> None:
    """HITL-3: this includes values that could be confused with other parts."""
    parts = {"store_id": "s", "run_id": "r", "call_id": "c", "tool_name": "t", "tool_version": 1, "arguments": b"{}"}
    changed = [
        parts | {name: value}
        for name, value in {
            "store_id": "sr",
            "run_id": "",
            "call_id": 'c","t',
            "tool_name": "T",
            "tool_version": 11,
            "arguments": b'{"a":1}',
        }.items()
    ]
    digests = {call_digest(**call) for call in [parts, *changed]}  # type: ignore[arg-type]
    assert len(digests) == len(changed) + 1


def test_resource_keys_come_from_the_arguments() -> None:
    assert resource_keys(("path:{path}",), {"path": "a/b"}) == ("path:a/b",)
    assert resource_keys(("n:{n}", "all"), {"n": {"b": 1, "a": 2}}) == ("all", 'n:{"a":2,"b":1}')
    assert resource_keys(("path:{paths}",), {"paths": ["b", "a", "b", None]}) == ("path:a", "path:b")
    assert resource_keys(("path:{path}",), {"path": None}) == resource_keys(("path:{path}",), {}) == ()


def test_resource_keys_are_limited_in_length_and_number() -> None:
    long, other = ({"path": "x" * 9999 + end} for end in "ab")
    (one,), (two,) = resource_keys(("p:{path}",), long), resource_keys(("p:{path}",), other)
    assert one != two
    assert len(one) <= 512
    many: dict[str, JsonValue] = {"paths": [str(number) for number in range(KEYS_MAX + 1)]}
    assert resource_keys(("p:{paths}",), many) == ("p:{paths}",)


@for_each("template", ["", "x" * 300, "a:{nope}", "a:{path", "a:path}", "{path}{paths}"])
def test_an_invalid_key_template_is_refused(template: str) -> None:
    assert check_template(template, SAFE.arguments_schema)


@for_each(
    ("field", "change"),
    [
        ("name", {"name": "with space"}),
        ("name", {"name": "x" * 65}),
        ("description", {"description": ""}),
        ("description", {"description": "ø" * 2049}),
        ("timeout_seconds", {"timeout_seconds": 0.05}),
        ("timeout_seconds", {"timeout_seconds": 3601.0}),
        ("timeout_seconds", {"timeout_seconds": float("nan")}),
        ("result_bytes_max", {"result_bytes_max": 2**20 + 1}),
        ("allowed_user_ids", {"allowed_user_ids": ("a b",)}),
        ("resource_keys", {"resource_keys": ("p:{nope}",)}),
        ("fallback_tool_name", {"fallback_tool_name": "x"}),
        ("fallback_tool_name", {"offer_fallback": OfferFallback.BACKEND_TOOL}),
        ("rate_per_minute", {"context": ExecutionContext.FRONTEND, "rate_per_minute": 1}),
        ("rate_per_minute", {"context": ExecutionContext.HUMAN, "rate_per_minute": 1}),
        (
            "cache_seconds",
            {"context": ExecutionContext.FRONTEND, "effect": EffectClass.READ_ONLY, "cache_seconds": 1.0},
        ),
        ("approvals_required", {"context": ExecutionContext.HUMAN, "approvals_required": 2}),
    ],
)
def test_an_out_of_range_definition_is_refused_and_names_the_field(field: str, change: dict[str, object]) -> None:
    """TOOL-2: the error has the field in its metadata."""
    check_definition(SAFE)
    with pytest.raises(InvalidField) as error:
        check_definition(replace(SAFE, **change))  # type: ignore[arg-type]
    assert error.value.metadata["field"] == field


def test_a_stored_definition_reads_back_the_same() -> None:
    for context, category, effect in itertools.product(ExecutionContext, Category, EffectClass):
        written = replace(
            SAFE, context=context, category=category, effect=effect, resource_keys=("p:{path}",), timeout_seconds=2
        )
        read = decode_definition(loads(encode_definition(written), bytes_max=10**6))
        assert read == written
        assert definition_hash(read) == definition_hash(written)


@for_each(
    ("category", "effect", "context", "items", "cause"),
    [
        (Category.SAFE, EffectClass.IDEMPOTENT, ExecutionContext.BACKEND, 2, ""),
        (Category.SAFE, EffectClass.IDEMPOTENT, ExecutionContext.FRONTEND, 3, "bulk of 3"),
        (Category.SAFE, EffectClass.READ_ONLY, ExecutionContext.BACKEND, 300, ""),
        (Category.SENSITIVE, EffectClass.READ_ONLY, ExecutionContext.FRONTEND, 0, "category SENSITIVE"),
        (
            Category.DESTRUCTIVE,
            EffectClass.AT_MOST_ONCE,
            ExecutionContext.BACKEND,
            5,
            "category DESTRUCTIVE, bulk of 5",
        ),
        (Category.DESTRUCTIVE, EffectClass.IDEMPOTENT, ExecutionContext.HUMAN, 9, ""),
        (Category.SAFE, EffectClass.IDEMPOTENT, ExecutionContext.AGENT, 9, ""),
        (Category.SENSITIVE, EffectClass.IDEMPOTENT, ExecutionContext.AGENT, 9, "category SENSITIVE"),
    ],
)
def test_a_call_is_gated_by_category_or_bulk(
    category: Category, effect: EffectClass, context: ExecutionContext, items: int, cause: str
) -> None:
    """D8, HITL-2, C6: the cause is empty if the call is not gated."""
    assert approval_cause(replace(SAFE, category=category, effect=effect, context=context), items) == cause
