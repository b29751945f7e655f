"""User rules, and which of them decides a call."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.errors import InvalidField
from pawl.tool_registry.policy.rules.patterns import (
    ArgumentKind,
    ArgumentPattern,
    Matching,
    TooMuchToMatch,
    Work,
    argument_acts,
    argument_kinds,
    canonical_value,
    glob_matches,
    glob_reaches,
)
from pawl.tool_registry.policy.rules.rules import Rule, RuledCall, RuleEffect, RuleScope, check_rule, ruling
from pawl.values import Category
from tests.tables import for_each

ANN = UserId("ann")

STORE = StoreId("s")

NOW = 1000.0
ASKING = Rule(
    store_id=STORE, rule_id="rule", effect=RuleEffect.ASK, scope=RuleScope.USER, scope_id="", user_id=ANN, tool_name="*"
)


def call(arguments: Mapping[str, Any] | None = None, **changes: Any) -> RuledCall:
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
        "agent_name": "default",
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
    agent_name=st.sampled_from(["r", "c", "x"]),
    agents_above=st.sets(st.sampled_from(["r", "c", "x"])).map(frozenset),
)


@given(rules.map(lambda rule: replace(rule, scope=RuleScope.AGENT)), calls)
def test_only_restrictive_agent_rules_extend_to_sub_agents(rule: Rule, asked: RuledCall) -> None:
    applies_to_all = ruling([replace(rule, scope=RuleScope.STORE)], asked, NOW) is not None
    above = asked.agents_above if rule.effect is not RuleEffect.ALLOW else set()
    is_in_scope = rule.scope_id in {asked.agent_name, *above}
    assert (ruling([rule], asked, NOW) is not None) == (applies_to_all and is_in_scope)


@given(st.lists(rules, max_size=8), calls, st.sampled_from(["r", "c", "x"]))
def test_a_child_run_is_at_least_as_restricted_as_the_agents_above_it(
    made: list[Rule], asked: RuledCall, above: str
) -> None:
    """Otherwise an agent could do through a child run what it may not do itself."""
    below = replace(asked, agents_above=asked.agents_above | {above})

    def severity(decides: Rule | None) -> int:
        return 0 if decides is None else {RuleEffect.ALLOW: 0, RuleEffect.ASK: 1, RuleEffect.DENY: 2}[decides.effect]

    lower = severity(ruling(made, below, NOW))
    assert lower >= severity(ruling(made, asked, NOW))
    restricting = [rule for rule in made if rule.effect is not RuleEffect.ALLOW]
    assert lower >= severity(ruling(restricting, replace(asked, agent_name=above, agents_above=frozenset()), NOW))


@given(st.lists(rules, max_size=8), calls)
def test_deny_wins_and_only_active_rules_in_scope_apply(made: list[Rule], asked: RuledCall) -> None:
    decides = ruling(made, asked, NOW)
    if decides is None:
        return
    assert (decides.revoke_time, decides.expire_time == NOW - 1) == (0, False)
    assert decides.is_of_store or decides.user_id == "ann"
    assert decides.tool_name in {"files.write", "files.*", "*"}
    alone = {rule.effect for rule in made if ruling([rule], asked, NOW)}
    strictest = next(effect for effect in (RuleEffect.DENY, RuleEffect.ASK, RuleEffect.ALLOW) if effect in alone)
    assert decides.effect is strictest


@given(rules, calls)
def test_an_allow_rule_never_covers_calls_that_its_author_could_not_foresee(rule: Rule, asked: RuledCall) -> None:
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


def meets(pattern: ArgumentPattern, arguments: Mapping[str, Any], *, strictly: bool = True, **declared: str) -> bool:
    kinds = {name: ArgumentKind(kind) for name, kind in declared.items()}
    return Matching(arguments=arguments, kinds=kinds).meets(pattern, strictly=strictly)


@for_each(
    ("to", "allows", "denies"),
    [
        ({"to": ["a@example.com", "b@example.com"]}, True, True),
        ({"to": ["a@example.com", "b@evil.org"]}, False, True),
        ({"to": []}, False, False),
        ({}, False, False),
        ({"to": 5}, False, False),
    ],
)
def test_an_allow_rule_must_match_every_item_but_a_deny_rule_only_one(
    to: dict[str, Any], allows: bool, denies: bool
) -> None:
    inside = ArgumentPattern(argument="to", glob="*@example.com")
    assert [meets(inside, to, strictly=strictly) for strictly in (True, False)] == [allows, denies]


@for_each("glob", ["boss@example.com", "Boss@Example.com", "*@EXAMPLE.com"])
def test_an_address_is_denied_in_any_case(glob: str) -> None:
    """Almost all mail servers ignore case, even before the @."""
    pattern = ArgumentPattern(argument="to", glob=glob)
    assert meets(pattern, {"to": ["BOSS@example.com."]}, strictly=False, to="email")


@for_each(
    ("equals", "value", "matches"),
    [
        (5.0, 5, True),
        (5.0, "5", False),
        (5.0, True, False),
        (1, True, False),
        (1e20, 1e20, True),  # Beyond 64 bits all numbers are floats.
        (5.0, [1e20, {"a": -1e300}], False),
    ],
)
def test_equal_numbers_match(equals: float, value: Any, matches: bool) -> None:
    assert meets(ArgumentPattern(argument="n", equals=canonical_value(equals)), {"n": value}) is matches


@for_each(
    "spelling",
    [
        "http://evil.com/a",
        "HTTP://Evil.Com/a",
        "http://evil.com./a",
        " http://evil.com/a",
        "http://evil.com:80/a",
        "http:\\\\evil.com\\a",
        "http:/evil.com/b/../a",
        "http://user@evil.com/%61",
        "http://\u24d4vil.com/a",
        "http://ev\u200bil.com/a",
        "http://ev\til.com/a",
        "http://e\ufe0fvil.com/a",
        "http://%65vil.com/a",
    ],
)
def test_a_url_is_denied_in_every_spelling_but_allowed_in_only_one(spelling: str) -> None:
    for glob in ("http://evil.com/*", "HTTP://EVIL.com/*", "http://evil.com/a"):
        assert meets(ArgumentPattern(argument="url", glob=glob), {"url": spelling}, strictly=False), glob
    equals = ArgumentPattern(argument="url", equals=canonical_value("http://evil.com/a"))
    assert meets(equals, {"url": spelling}, strictly=False)
    other = ArgumentPattern(argument="url", glob=f"{spelling[:9].replace('?', '*')}*.org/*")
    assert not meets(other, {"url": spelling})


@for_each(
    ("glob", "spelling"),
    [
        ("http://evil.com/*", "http://evil.com?@good.com/"),
        ("http://evil.com/*", "http://evil.com#@good.com/"),
        ("http://127.0.0.1/*", "http://2130706433/"),
        ("http://127.0.0.1/*", "http://0x7f.1/"),
        ("http://a/b%20c*", "HTTP://A/b%20c"),
        ("http://a/b?c=d*", "http://a/b?c=%64"),
    ],
)
@for_each("kind", ["url", "text"])
def test_a_url_is_denied_by_its_decoded_host_and_text(glob: str, spelling: str, kind: str) -> None:
    assert meets(ArgumentPattern(argument="url", glob=glob), {"url": spelling}, strictly=False, url=kind)


@for_each("spelling", ["secret/a", "./secret/a", "public/../secret/a", "secret//a", "/secret/a", " secret/a"])
def test_a_path_is_denied_in_every_spelling(spelling: str) -> None:
    assert meets(ArgumentPattern(argument="path", glob="secret/*"), {"path": spelling}, strictly=False, path="path")
    assert not meets(ArgumentPattern(argument="path", glob="public/*"), {"path": "public/../secret/a"}, path="path")


def test_a_rule_for_a_tool_applies_to_tools_declared_to_act_like_it() -> None:
    """If a user may not read a file, they may not move it or its folder to a readable place either."""
    schema = {
        "properties": {
            "path": {"type": "string", "format": "path", "x-pawl-acts-as": ["read_file.path/*"]},
            "new_path": {"type": "string", "x-pawl-acts-as": ["write_file.path"]},
        }
    }

    def ruled(effect: RuleEffect, tool_name: str, glob: str, arguments: Mapping[str, Any]) -> bool:
        rule = Rule(
            store_id=STORE,
            rule_id="rule",
            effect=effect,
            scope=RuleScope.STORE,
            scope_id="",
            user_id=ANN,
            tool_name=tool_name,
            arguments=(ArgumentPattern(argument="path", glob=glob),),
            tool_version=1,
            create_time=1.0,
        )
        moving = call(arguments, tool_name="move_file", kinds=argument_kinds(schema), acts=argument_acts(schema))
        return ruling([rule], moving, NOW) is not None

    for path in ("secret/a", "secret", "./secret/b/c"):
        assert ruled(RuleEffect.DENY, "read_file", "secret/*", {"path": path, "new_path": "x"}), path
    assert ruled(RuleEffect.ASK, "write_file", "config/*", {"path": "a", "new_path": "config/a"})
    assert not ruled(RuleEffect.DENY, "read_file", "secret/*", {"path": "public/secret", "new_path": "x"})
    assert not ruled(RuleEffect.DENY, "read_file", "secret/*", {"path": "secrets", "new_path": "secret/x"})
    assert not ruled(RuleEffect.ALLOW, "read_file", "secret/*", {"path": "secret/a", "new_path": "x"})


@given(st.text("ab/", max_size=12), st.text("ab?*/", max_size=8))
def test_globs_match_like_shell_patterns(text: str, glob: str) -> None:
    assert glob_matches(text, glob, Work()) == fnmatchcase(text, glob)


@given(st.text("ab", max_size=3), st.text("ab?*", max_size=4))
def test_a_glob_reaches_below_a_prefix_only_if_something_there_can_match(prefix: str, glob: str) -> None:
    endings = ("".join(letters) for length in range(5) for letters in itertools.product("ab", repeat=length))
    assert glob_reaches(prefix, glob, Work()) == any(fnmatchcase(prefix + ending, glob) for ending in endings)


hard_globs = st.lists(st.sampled_from(["*", "?", "a", "a?" * 20, "a" * 50, "*a" * 100, "b"]), max_size=20).map("".join)
hard_texts = st.lists(st.sampled_from(["a", "b", "ab"]), max_size=3).map(lambda parts: "".join(parts) * 60_000)


@settings(deadline=None)
@given(hard_globs, hard_texts)
def test_the_work_done_by_glob_matching_is_limited(glob: str, text: str) -> None:
    """Each counted step is a few Python operations and at most 100 characters of C work."""
    work = Work(left=2000)
    steps = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        with contextlib.suppress(TooMuchToMatch):
            glob_matches(text, glob, work)
    finally:
        sys.settrace(before)
    assert steps <= 15 * (2000 - max(work.left, 0)) + 100


def test_long_sequences_of_combining_marks_are_refused() -> None:
    """Sorting combining marks takes quadratic time."""
    for marks in ("\u0301\u0327", "\u0f73\u0f81", "\uff9e\u0301"):
        text = "a" + marks * 100
        with pytest.raises(TooMuchToMatch):
            meets(ArgumentPattern(argument="a", glob="b*"), {"a": text}, strictly=False)
        with pytest.raises(InvalidField, match="combining marks"):
            check_rule(replace(ASKING, arguments=(ArgumentPattern(argument="a", glob=text),)), NOW)
        with pytest.raises(InvalidField, match="combining marks"):
            check_rule(replace(ASKING, arguments=(ArgumentPattern(argument="a", equals=canonical_value(text)),)), NOW)
    assert not meets(ArgumentPattern(argument="a", glob="b*"), {"a": "a\u0301\u0327" * 1000}, strictly=False)


def test_a_rule_ignores_a_later_tool_with_the_same_name_and_version() -> None:
    """Deployment tools and store tools of the same name both count versions from 1."""
    rule = Rule(
        store_id=StoreId("acme"),
        rule_id="rule",
        effect=RuleEffect.ALLOW,
        scope=RuleScope.USER,
        scope_id="",
        user_id=ANN,
        tool_name="files.write",
        tool_version=1,
        create_time=NOW,
    )
    assert ruling([rule], call(tool_create_time=NOW - 1), NOW) == rule
    assert ruling([rule], call(tool_create_time=NOW + 1), NOW + 2) is None


@given(rules, calls)
def test_child_runs_inherit_denials_but_not_permissions(made: Rule, asked: RuledCall) -> None:
    """TOOL-7: a permission for a run or conversation does not apply to its child runs."""
    here = ruling([made], asked, NOW)
    below = ruling(
        [made],
        replace(asked, run_id=RunId("r2"), conversation_id=ConversationId("c2"), above_ids=frozenset({"r", "c"})),
        NOW,
    )
    is_allowing = made.effect is RuleEffect.ALLOW
    assert is_allowing or here is None or below is made
    assert not is_allowing or made.scope not in {RuleScope.RUN, RuleScope.CONVERSATION} or below is None
