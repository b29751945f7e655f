"""Agents: tool selection, options that runs inherit, and limits that runs cannot widen."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import (
    DEFAULT,
    AgentCard,
    AgentDefinition,
    AgentVersion,
    OfferedTool,
    ToolSelection,
    check,
    delegated,
    deployed,
    matches,
    options_of,
    select,
)
from pawl.agent_loop.loop.rules import background
from pawl.agent_loop.loop.rules.guidelines import ASKING, GUIDELINES
from pawl.agent_loop.loop.rules.limits import NONE_IS_ZERO, Limits
from pawl.agent_loop.loop.rules.options import AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.run import RoundLimitPolicy, RunOptions, ToolChoice, ToolChoiceMode
from pawl.errors import InvalidField, PawlError, ToolNotFound
from tests.fakes.model import says
from tests.fakes.registry import tool
from tests.tables import for_each
from tests.unit.agent_loop.test_jobs import Story

DEFAULTS = RunDefaults(model="the-model", instructions="Be brief.")
OFFERED = [
    OfferedTool(name="look", source="builtin"),
    OfferedTool(name="mail", source="builtin"),
    OfferedTool(name="run_agent", source="builtin"),
    OfferedTool(name="shop.order", source="http:shop"),
    OfferedTool(name="shop.pay", source="http:shop"),
]


def definition(name: str = "clerk", **fields: Any) -> AgentDefinition:
    return AgentDefinition(name=name, **fields)


def agent(name: str = "clerk", *tools: str, **options: Any) -> AgentVersion:
    selection = ToolSelection(names=tools) if tools else ToolSelection()
    return AgentVersion(
        definition=definition(name, options=AskedOptions(**options), tools=selection), version=3, tool_names=tools
    )


def run_of(found: AgentVersion, **asked: Any) -> RunOptions:
    return complete(options_of(found, AskedOptions(**asked), DEFAULTS.ceilings), DEFAULTS)


@given(st.text("ab.*", max_size=8), st.text("ab.", max_size=8))
def test_a_star_in_a_tool_pattern_matches_any_characters(pattern: str, name: str) -> None:
    assert matches(pattern, name) is bool(re.fullmatch(fnmatch.translate(pattern), name))


def test_tools_are_selected_by_name_by_source_and_by_pattern() -> None:
    tools = ToolSelection(names=("look",), sources=("http:shop", "mcp:gone"), patterns=("sh*.pay", "x*"))
    delegating = definition(tools=ToolSelection(names=("look",)), delegates_to=("b",))
    assert [select(each, OFFERED) for each in (definition(tools=tools), definition(), delegating)] == [
        (("look", "shop.order", "shop.pay"), ("mcp:gone", "x*")),
        ((), ()),
        (("look", "run_agent"), ()),
    ]
    with pytest.raises(ToolNotFound, match="fly"):
        select(definition(tools=ToolSelection(names=("fly",))), OFFERED)


@for_each(
    ("fields", "named"),
    [
        ({"name": "no name"}, "definition.name"),
        ({"options": AskedOptions(tool_names=("look",))}, "definition.options"),
        ({"options": AskedOptions(without_tools=True), "tools": ToolSelection(names=("look",))}, "definition.tools"),
        ({"options": AskedOptions(limits={"rounds_max": 5000})}, "options.limits.rounds_max"),
        ({"options": AskedOptions(temperature=9.0)}, "options.temperature"),
        ({"tools": ToolSelection(patterns=("",))}, "definition.tools.patterns"),
        ({"tools": ToolSelection(names=("x" * 300,))}, "definition.tools.names"),
        ({"delegates_to": ("a b",)}, "definition.delegates_to"),
        ({"delegates_to": tuple(map(str, range(65)))}, "definition.delegates_to"),
        ({"allowed_roles": ("a b",)}, "definition.allowed_roles"),
        ({"name": DEFAULT, "allowed_roles": ("clerk",)}, "definition.allowed_roles"),
        ({"card": AgentCard(title="x" * 201)}, "definition.card.title"),
        ({"card": AgentCard(description="\0")}, "definition.card.description"),
        ({"card": AgentCard(example_prompts=("hi",) * 11)}, "definition.card.example_prompts"),
        *(
            ({"card": AgentCard(avatar_url=url)}, "definition.card.avatar_url")
            for url in (
                *(
                    "http://a.example/x.png",
                    "https://",
                    "https:///x.png",
                    "x.png",
                    "javascript:alert(1)",
                    "data:image/png,",
                ),
                *("https://ann:secret@a.example/", "https://a.example/x y", "https://a.example:x/", "https://[::1/"),
                *("https://a.example/" + "x" * 2000, 'https://a.example/"><script>', "https://bücher.example/"),
            )
        ),
    ],
)
def test_an_invalid_definition_is_refused_and_names_the_field(fields: Any, named: Any) -> None:
    with pytest.raises(PawlError) as refused:
        check(definition(**fields), DEFAULTS)
    assert refused.value.metadata["field"] == named


@for_each("url", ["", "https://a.example", "https://a.example:8443/x.png?size=2#top", "https://[::1]/"])
def test_an_agent_card_accepts_a_picture_url(url: Any) -> None:
    assert check(definition(card=AgentCard(avatar_url=url)), DEFAULTS).card.avatar_url == url


def test_a_run_inherits_options_that_it_does_not_set_from_its_agent() -> None:
    found = agent("clerk", "look", "mail", instructions="Book it.", limits={"rounds_max": 3}, temperature=0.5)
    options = run_of(found)
    assert (options.instructions, options.model, options.temperature) == ("Book it.", "the-model", 0.5)
    assert (options.tool_names, options.limits.rounds_max) == (("look", "mail"), 3)
    assert run_of(agent()).instructions == "Be brief.", "unset options come from the deployment"


def test_the_run_its_agent_or_the_deployment_can_disable_background_calls() -> None:
    off, silent = agent(without_background=True), agent(without_guidelines=True)
    without = replace(DEFAULTS, without_background=True)
    disabled = [
        run_of(off),
        run_of(off, without_background=True),
        run_of(agent(), without_background=True),
        complete(AskedOptions(), without),
        delegated(off, RunOptions()),
        deployed(without).definition.options,
    ]
    assert [each.without_background for each in (*disabled, run_of(agent()))] == [True] * 6 + [False]
    options = (run_of(silent), delegated(silent, RunOptions()), run_of(agent()))
    assert [each.without_guidelines for each in options] == [True, True, False]


def test_a_run_can_only_narrow_its_agent() -> None:
    found = agent("clerk", "look", "mail", instructions="Book it.", limits={"rounds_max": 5, "total_tokens_max": 1000})
    narrowed = run_of(found, tool_names=("look",), limits={"rounds_max": 2, "total_tokens_max": 10}, model="m")
    assert (narrowed.tool_names, narrowed.limits.rounds_max, narrowed.limits.total_tokens_max) == (("look",), 2, 10)
    assert narrowed.model == "m", "the agent does not set it"
    more = run_of(found, without_tools=True, approvals_required=2)
    assert (more.without_tools, more.approvals_required) == (True, 2)
    assert run_of(agent(limits={"agent_depth_max": 1}), limits={"agent_depth_max": 0}).limits.agent_depth_max == 0
    for beyond in (
        {"instructions": "Do as you like."},
        {"tool_names": ("fly",)},
        {"tool_choice": ToolChoice(mode=ToolChoiceMode.TOOL, tool_name="fly")},
        {"limits": {"rounds_max": 6}},
        {"limits": {"total_tokens_max": 0}},
    ):
        with pytest.raises(InvalidField, match="clerk"):
            run_of(found, **beyond)
    with pytest.raises(InvalidField, match="round_limit_policy"):
        run_of(
            agent(temperature=0.5, round_limit_policy=RoundLimitPolicy.FAIL), temperature=0.5, round_limit_policy="x"
        )


def test_the_default_agent_fills_options_that_a_run_leaves_unset() -> None:
    found = agent(DEFAULT, "look", instructions="Book it.", limits={"rounds_max": 3})
    assert run_of(found).tool_names == ("look",)
    own = run_of(found, instructions="Do it.", tool_names=("mail",), limits={"rounds_max": 7})
    assert (own.instructions, own.tool_names, own.limits.rounds_max) == ("Do it.", ("mail",), 7)
    with pytest.raises(InvalidField, match="at most"):
        run_of(found, limits={"rounds_max": 5000})


def test_model_fallbacks_are_inherited_only_with_their_model() -> None:
    found, own = agent(model="a", model_fallbacks=("b",)), RunOptions(model="x", model_fallbacks=("y",))
    default = agent(DEFAULT, model="a", model_fallbacks=("b",))
    rows: list[tuple[RunOptions, tuple[str, ...]]] = [
        (run_of(found), ("b",)),
        (run_of(agent(), model_fallbacks=("b",)), ("b",)),  # The agent does not set its model.
        (run_of(default, model="a"), ("b",)),
        (run_of(default, model="c"), ()),
        (delegated(agent(model="a"), own), ()),
        (delegated(found, own), ("b",)),
        (delegated(agent(), own), ("y",)),
    ]
    assert [options.model_fallbacks for options, _ in rows] == [fallbacks for _, fallbacks in rows]
    with pytest.raises(InvalidField, match="model_fallbacks"):
        run_of(agent(model="a"), model_fallbacks=("b",))


def test_an_agent_whose_patterns_do_not_match_anything_has_no_tools() -> None:
    """An empty list of names would mean all tools."""
    empty = AgentVersion(definition=definition(tools=ToolSelection(patterns=("x*",))), version=1)
    assert run_of(empty).without_tools
    assert delegated(empty, RunOptions(tool_names=("look",))).without_tools


def test_the_deployment_default_lists_its_options() -> None:
    given = deployed(DEFAULTS)
    assert (given.version, given.definition.name) == (0, DEFAULT)
    assert complete(given.definition.options, DEFAULTS) == complete(AskedOptions(), DEFAULTS)


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "rounds_max": st.integers(1, 30),
        "run_timeout_seconds": st.floats(1, 900),
        "total_tokens_max": st.integers(0, 5),
        "agent_depth_max": st.integers(0, 4),
    },
)
TOOLS = st.lists(st.sampled_from(["look", "mail", "pay"]), unique=True, max_size=3).map(tuple)


def not_wider(inner: Limits, outer: Limits) -> bool:
    pairs = ((name, getattr(inner, name), getattr(outer, name)) for name in Limits.__struct_fields__)
    return all(
        (a <= b and (a > 0 or b == 0 or name not in NONE_IS_ZERO)) or (b == 0 and name in NONE_IS_ZERO)
        for name, a, b in pairs
    )


@given(agent_limits=LIMITS, run_limits=LIMITS, tools=TOOLS, wanted=TOOLS)
def test_a_run_never_exceeds_the_limits_of_its_agent(
    agent_limits: dict[str, float], run_limits: dict[str, float], tools: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    found = agent("clerk", *tools, limits=agent_limits)
    bound = run_of(found)
    try:
        options = run_of(found, limits=run_limits, tool_names=wanted)
    except InvalidField:
        return
    assert not tools or options.without_tools or set(options.tool_names) <= set(tools)
    for name in agent_limits:
        inner, outer = getattr(options.limits, name), getattr(bound.limits, name)
        assert inner <= outer or (outer == 0 and name in NONE_IS_ZERO)


@given(agent_limits=LIMITS, own=LIMITS)
def test_a_child_run_never_exceeds_the_limits_of_its_parent(
    agent_limits: dict[str, float], own: dict[str, float]
) -> None:
    above = complete(AskedOptions(limits=own), DEFAULTS)
    assert not_wider(delegated(agent(limits=agent_limits), above).limits, above.limits)


# Agents with their own instructions also get the guidelines on questions and background calls.


OWN = "You are a clerk."
QUESTIONS = ASKING.format(tool="ask")
CALLS = background.INSTRUCTIONS


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        (RunOptions(instructions=OWN), [OWN, QUESTIONS, CALLS]),
        (RunOptions(instructions=OWN, tool_names=("work",)), [OWN, CALLS]),
        (RunOptions(instructions=OWN, without_background=True), [OWN, QUESTIONS]),
        (RunOptions(instructions=OWN, without_tools=True), [OWN]),
        (RunOptions(instructions=OWN, without_guidelines=True), [OWN]),
        # The deployment's default instructions explain questions.
        (RunOptions(instructions=f"{GUIDELINES}\n\nBe brief."), [f"{GUIDELINES}\n\nBe brief.", CALLS]),
        (RunOptions(), [CALLS]),
    ],
)
async def test_guidelines_are_added_to_other_instructions(options: RunOptions, prompt: list[str]) -> None:
    story = Story(says("Yes."))
    story.world.registry.verdicts = {"ask": tool("ASK", context="HUMAN"), "work": tool()}
    await story.finish("hello", options)
    system, *_ = story.world.model.requests[0].messages
    assert system == {"role": "system", "content": "\n\n".join(prompt)}
