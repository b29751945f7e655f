"""Tools supplied with a run: validation, names, and rules that never allow their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.errors import InvalidField, ToolExists
from pawl.tool_registry.audit.rules import TOOL_NAME_CHARACTERS_MAX
from pawl.tool_registry.policy.rules.rules import Rule, RuledCall, RuleEffect, RuleScope, ruling
from pawl.tool_registry.rules.definition import ToolDefinition, ToolVersion, can_exist
from pawl.tool_registry.rules.registering import (
    FRONT_END,
    OWN_TOOLS_MAX,
    check_not_shadowing,
    check_own,
    own_label,
    own_version,
)
from pawl.values import Category, ExecutionContext
from tests.tables import for_each

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
def test_a_label_identifies_one_client_supplied_tool_and_cannot_be_a_tool_name(
    name: str, digest: str, other: str, another: str
) -> None:
    label = own_label(name, digest)
    assert not can_exist(label)
    assert len(label) <= TOOL_NAME_CHARACTERS_MAX
    same = (name, digest[:12]) == (other, another[:12])
    assert (label == own_label(other, another)) is same


@given(st.sampled_from(["show", "*"]), st.sampled_from(RuleScope), st.floats(0, 1e10), st.integers(0, 3))
def test_allow_rules_never_apply_to_client_supplied_tools(
    pattern: str, scope: RuleScope, create_time: float, tool_version: int
) -> None:
    """The author of a rule cannot know such a tool: the next run may bring another of that name."""
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
    scope_id = {RuleScope.RUN: "r", RuleScope.CONVERSATION: "c", RuleScope.AGENT: "clerk"}.get(scope, "")
    rule = Rule(
        store_id=STORE,
        rule_id="rule",
        effect=RuleEffect.ALLOW,
        scope=scope,
        scope_id=scope_id,
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
    """It cannot use the other tool's name on the wire to a model either."""
    with pytest.raises(ToolExists, match="rename the one sent with this run"):
        check_not_shadowing([definition("unlike"), definition(), definition("http__shop")], [other])


def test_a_client_supplied_tool_with_the_same_definition_is_the_same_tool() -> None:
    check_not_shadowing([definition()], [version(definition()), version(definition("other"), "builtin")])
