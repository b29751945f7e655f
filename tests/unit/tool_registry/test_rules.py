"""Approval gates, call digests, resource keys and client-supplied tools. HITL-2, HITL-3, LOOP-9, D8."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.chassis.strict_json import JsonValue, loads
from pawl.errors import InvalidField, ToolExists
from pawl.tool_registry.audit.rules import TOOL_NAME_CHARACTERS_MAX
from pawl.tool_registry.policy.rules.gate import approval_cause, count_at, longest_array, may_be_count_path
from pawl.tool_registry.policy.rules.rules import Rule, RuledCall, RuleEffect, RuleScope, ruling
from pawl.tool_registry.rules.registering import (
    FRONT_END,
    OWN_TOOLS_MAX,
    check_not_shadowing,
    check_own,
    own_label,
    own_version,
)
from pawl.tool_registry.rules.verdict import call_digest
from pawl.tools.rules.definition import (
    ToolDefinition,
    ToolVersion,
    can_exist,
    check_definition,
    decode_definition,
    definition_hash,
    encode_definition,
)
from pawl.tools.rules.resources import KEYS_MAX, check_template, resource_keys
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
    rows: list[dict[str, Any]] = [{"a": [1], "b": [1, 2, 3, 4], "e": "text"}, {"a": [1], "body": {"d": [[0] * 99]}}, {}]
    assert list(map(longest_array, rows)) == [4, 99, 0]


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
    assert (may_be_count_path(path), count_at(arguments, path)) == (True, count)


@for_each("path", ["", "$", "$.", "a..b", "[*]", "a[0]", "a.[*]", "$.a[*]b", "a" * 201])
def test_an_invalid_count_path_is_refused(path: str) -> None:
    assert not may_be_count_path(path)


def test_every_part_of_a_call_changes_its_digest() -> None:
    """HITL-3: values that could be confused with other parts change the digest too."""
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


@for_each(
    ("templates", "arguments", "keys"),
    [
        (("path:{path}",), {"path": "a/b"}, ("path:a/b",)),
        (("n:{n}", "all"), {"n": {"b": 1, "a": 2}}, ("all", 'n:{"a":2,"b":1}')),
        (("path:{paths}",), {"paths": ["b", "a", "b", None]}, ("path:a", "path:b")),
        (("path:{path}",), {"path": None}, ()),
        (("path:{path}",), {}, ()),
    ],
)
def test_resource_keys_come_from_the_arguments(
    templates: tuple[str, ...], arguments: dict[str, Any], keys: tuple[str, ...]
) -> None:
    assert resource_keys(templates, arguments) == keys


def test_resource_keys_are_limited_in_length_and_number() -> None:
    long, other = ({"path": "x" * 9999 + end} for end in "ab")
    (one,), (two,) = resource_keys(("p:{path}",), long), resource_keys(("p:{path}",), other)
    assert (one == two, len(one) <= 512) == (False, True)
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
        assert (read, definition_hash(read)) == (written, definition_hash(written))


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


STORE, ANN = StoreId("s"), UserId("ann")
NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


def definition(name: str = "show", **fields: Any) -> ToolDefinition:
    values: dict[str, Any] = {
        "description": "Show it.",
        "arguments_schema": {"type": "object"},
        "context": ExecutionContext.FRONTEND,
        "category": Category.SAFE,
    }
    return ToolDefinition(name=name, **(values | fields))


def version(tool: ToolDefinition, source: str = FRONT_END) -> ToolVersion:
    return ToolVersion(store_id=STORE, definition=tool, version=3, source=source, create_time=1.0)


@given(NAMES, DIGESTS, NAMES, DIGESTS)
def test_a_label_identifies_one_client_supplied_tool_and_cannot_be_the_name_of_a_tool(
    name: str, digest: str, other: str, another: str
) -> None:
    label = own_label(name, digest)
    assert not can_exist(label)
    assert len(label) <= TOOL_NAME_CHARACTERS_MAX
    assert (label == own_label(other, another)) is ((name, digest[:12]) == (other, another[:12]))


@given(st.sampled_from(["show", "*"]), st.sampled_from(RuleScope), st.floats(0, 1e10), st.integers(0, 3))
def test_allow_rules_never_apply_to_client_supplied_tools(
    pattern: str, scope: RuleScope, create_time: float, tool_version: int
) -> None:
    """The author of a rule cannot know such a tool, because the next run may bring another tool of that name."""
    entry = own_version(STORE, definition(category=Category.SENSITIVE))
    call = RuledCall(
        user_id=ANN,
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        tool_name="show",
        tool_versions=frozenset({entry.version, 0}),
        tool_create_time=entry.create_time,
        category=Category.SENSITIVE,
        items=0,
        approvals_required=1,
        user_may_approve=True,
        arguments={},
        agent_name="clerk",
    )
    rule = Rule(
        store_id=STORE,
        rule_id="rule",
        effect=RuleEffect.ALLOW,
        scope=scope,
        scope_id={RuleScope.RUN: "r", RuleScope.CONVERSATION: "c", RuleScope.AGENT: "clerk"}.get(scope, ""),
        user_id=ANN,
        tool_name=pattern,
        tool_version=tool_version,
        create_time=create_time,
    )
    assert ruling([rule], call, 2e10) is None
    for effect in (RuleEffect.ASK, RuleEffect.DENY):
        restricting = replace(rule, effect=effect)
        assert ruling([rule, restricting], call, 2e10) is restricting


@for_each(
    ("tools", "reason"),
    [
        ([], "1 to 64 tools"),
        ([definition(f"tool_{number}") for number in range(OWN_TOOLS_MAX + 1)], "1 to 64 tools"),
        ([definition(), definition(description="Another.")], "appears twice"),
        ([definition(allowed_user_ids=("ann",))], "remove allowed_user_ids and allowed_roles"),
        ([definition(allowed_roles=("admin",))], "remove allowed_user_ids and allowed_roles"),
    ],
)
def test_invalid_client_supplied_tools_are_refused_with_the_reason(tools: list[ToolDefinition], reason: str) -> None:
    with pytest.raises(InvalidField, match=reason):
        check_own(tools)


@for_each(
    "other",
    [
        version(definition(), "builtin"),
        version(definition(), "module:shop"),
        version(definition(description="Another.")),
        version(definition("http.shop"), "http:shop"),
        version(definition(), "worker:w"),
    ],
)
def test_a_client_supplied_tool_cannot_shadow_another_tool(other: ToolVersion) -> None:
    """A client-supplied tool cannot use the name under which a model sees another tool either."""
    with pytest.raises(ToolExists, match="rename the one sent with this run"):
        check_not_shadowing([definition("unlike"), definition(), definition("http__shop")], [other])


def test_a_client_supplied_tool_with_the_same_definition_is_the_same_tool() -> None:
    check_not_shadowing([definition()], [version(definition()), version(definition("other"), "builtin")])
