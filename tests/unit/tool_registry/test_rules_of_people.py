"""Which rule decides about a call: pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.tool_registry.domain.definition import Category
from services.tool_registry.domain.rules import (
    ArgumentPattern,
    Rule,
    RuledCall,
    RuleEffect,
    RuleScope,
    canonical_value,
    ruling,
)

NOW = 1000.0


def call(arguments: Mapping[str, Any] | None = None, **changes: Any) -> RuledCall:
    """A call of `files.write` by ann."""
    fields: dict[str, Any] = {
        "user_id": "ann",
        "conversation_id": "c",
        "run_id": "r",
        "tool_name": "files.write",
        "tool_versions": frozenset({1}),
        "tool_create_time": 0.0,
        "category": Category.SENSITIVE,
        "items": 0,
        "approvals_required": 0,
        "user_may_approve": True,
        "arguments": arguments or {},
    }
    return RuledCall(**fields | changes)


rules = st.builds(
    Rule,
    store_id=st.just("s"),
    rule_id=st.uuids().map(str),
    effect=st.sampled_from(RuleEffect),
    scope=st.sampled_from(RuleScope),
    scope_id=st.sampled_from(["", "r", "c", "x"]),
    user_id=st.sampled_from(["ann", "bob"]),
    tool_name=st.sampled_from(["files.write", "files.*", "*", "files.read", "file"]),
    items_max=st.integers(0, 4),
    includes_destructive=st.booleans(),
    uses_max=st.integers(0, 2),
    uses=st.integers(0, 2),
    tool_version=st.integers(0, 2),
    create_time=st.floats(0, 100),
    expire_time=st.sampled_from([0.0, NOW - 1, NOW + 1]),
    revoke_time=st.sampled_from([0.0, 0.0, 5.0]),
)
calls = st.builds(
    call,
    category=st.sampled_from(Category),
    items=st.integers(0, 5),
    approvals_required=st.integers(0, 2),
    tool_versions=st.sets(st.integers(1, 2), min_size=1).map(frozenset),
    tool_create_time=st.floats(0, 100),
)


@given(st.lists(rules, max_size=8), calls)
def test_deny_wins_and_nothing_that_ended_or_is_of_others_decides(made: list[Rule], asked: RuledCall) -> None:
    decides = ruling(made, asked, NOW)
    if decides is None:
        return
    assert not decides.revoke_time
    assert decides.expire_time != NOW - 1
    assert decides.scope is RuleScope.STORE or decides.user_id == "ann"
    assert decides.tool_name in {"files.write", "files.*", "*"}
    alone = [rule.effect for rule in made if ruling([rule], asked, NOW)]
    if RuleEffect.DENY in alone:
        assert decides.effect is RuleEffect.DENY
    elif RuleEffect.ASK in alone:
        assert decides.effect is RuleEffect.ASK


@given(rules, calls)
def test_an_allow_never_covers_what_its_author_could_not_mean(rule: Rule, asked: RuledCall) -> None:
    decides = ruling([rule], asked, NOW)
    if decides is None or decides.effect is not RuleEffect.ALLOW:
        return
    assert asked.approvals_required < 2
    assert asked.items <= max(rule.items_max, 2)
    if rule.is_for_one_tool:
        assert asked.tool_versions == {rule.tool_version}
    else:
        assert asked.tool_create_time <= rule.create_time
        assert rule.includes_destructive or asked.category is not Category.DESTRUCTIVE


def test_the_narrowest_rule_is_the_one_that_is_counted() -> None:
    def allow(rule_id: str, scope: RuleScope, scope_id: str = "") -> Rule:
        return Rule(
            store_id="s",
            rule_id=rule_id,
            effect=RuleEffect.ALLOW,
            scope=scope,
            scope_id=scope_id,
            user_id="ann",
            tool_name="files.write",
            tool_version=1,
        )

    decides = ruling([allow("user", RuleScope.USER), allow("run", RuleScope.RUN, "r")], call(), NOW)
    assert decides is not None
    assert decides.rule_id == "run"


def test_patterns_look_at_every_item_and_an_absent_argument_matches_nothing() -> None:
    inside = ArgumentPattern(argument="to", glob="*@example.com")
    assert inside.matches({"to": ["a@example.com", "b@example.com"]})
    assert not inside.matches({"to": ["a@example.com", "b@evil.org"]})
    assert not inside.matches({"to": []})
    assert not inside.matches({})
    assert not inside.matches({"to": 5})
    five = ArgumentPattern(argument="n", equals=canonical_value(5.0))
    assert five.matches({"n": 5})
    assert not five.matches({"n": "5"})
    assert not five.matches({"n": True})
    one = ArgumentPattern(argument="n", equals=canonical_value(1))
    assert not one.matches({"n": True})


def test_a_rule_does_not_mean_a_tool_that_took_the_name_and_the_version_of_another() -> None:
    """A deployment brings a tool of the name that a tool of the store had: both count their versions from 1."""
    rule = Rule(
        store_id="acme",
        rule_id="rule",
        effect=RuleEffect.ALLOW,
        scope=RuleScope.USER,
        scope_id="",
        user_id="ann",
        tool_name="files.write",
        tool_version=1,
        create_time=NOW,
    )
    assert ruling([rule], call(tool_create_time=NOW - 1), NOW) == rule
    assert ruling([rule], call(tool_create_time=NOW + 1), NOW + 2) is None


@given(rules, calls)
def test_what_rules_deny_a_run_they_deny_those_below_it_and_what_they_allow_they_do_not(
    made: Rule, asked: RuledCall
) -> None:
    """TOOL-7."""
    here = ruling([made], asked, NOW)
    below = ruling([made], replace(asked, run_id="r2", conversation_id="c2", above_ids=frozenset({"r", "c"})), NOW)
    if made.effect is not RuleEffect.ALLOW and here is not None:
        assert below is made
    if made.effect is RuleEffect.ALLOW and made.scope in {RuleScope.RUN, RuleScope.CONVERSATION}:
        assert below is None
