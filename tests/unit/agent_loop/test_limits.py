"""Defaults hold where nothing is said; ceilings are the most that may be asked for."""

from __future__ import annotations

import pytest

from pawl.agent_loop.domain.limits import CEILINGS, Limits, read_ceilings
from pawl.agent_loop.settings import AgentLoopSettings
from pawl.errors import InvalidField


def settings(ceilings: str) -> AgentLoopSettings:
    keys = {"service_key": "s" * 32, "local_key": "k" * 32}
    given = {"database_url": "postgresql://x", "model": "m", "limit_ceilings": ceilings} | keys
    return AgentLoopSettings.model_validate(given)


@pytest.mark.parametrize(("own", "held"), [(0, 10), (5, 5), (99, 99), (600, 100)])
def test_the_timeout_of_a_tool_holds_up_to_the_ceiling(own: float, held: float) -> None:
    assert Limits().seconds_of_tool(own) == held


def test_a_run_narrows_what_tools_say_of_themselves_by_the_ceiling_alone() -> None:
    asked = Limits().with_asked({"tool_timeout_seconds": 5}, CEILINGS)
    assert (asked.seconds_of_tool(0), asked.seconds_of_tool(99)) == (5, 99)
    narrow = Limits().with_asked({"tool_timeout_seconds_max": 5}, CEILINGS)
    assert (narrow.seconds_of_tool(0), narrow.seconds_of_tool(99)) == (5, 5)


@pytest.mark.parametrize("name", sorted(set(Limits.__struct_fields__) - {"total_tokens_max", "topped_up_tokens_max"}))
def test_a_run_may_ask_for_each_limit_up_to_its_ceiling(name: str) -> None:
    ceiling = getattr(CEILINGS, name)
    assert ceiling >= getattr(Limits(), name)
    assert getattr(Limits().with_asked({name: ceiling}, CEILINGS), name) == ceiling
    with pytest.raises(InvalidField, match=f"{name} may be at most"):
        Limits().with_asked({name: ceiling + 1}, CEILINGS)


def test_a_deployment_says_ceilings_of_its_own() -> None:
    found = read_ceilings("rounds_max=50, tool_timeout_seconds=600,total_tokens_max=0", Limits(total_tokens_max=9))
    assert (found.rounds_max, found.tool_timeout_seconds, found.tool_timeout_seconds_max) == (50, 600, 600)
    assert (found.total_tokens_max, found.run_timeout_seconds) == (0, CEILINGS.run_timeout_seconds)
    assert isinstance(found.rounds_max, int)


def test_no_ceiling_is_below_its_default() -> None:
    found = read_ceilings("", Limits(tool_timeout_seconds=300, total_tokens_max=500))
    assert (found.tool_timeout_seconds, found.tool_timeout_seconds_max) == (300, 300)
    assert found.total_tokens_max == 500, "a budget is a ceiling unless something else is said"


@pytest.mark.parametrize(
    "text", ["rounds_max=9", "rounds_max", "rounds_max=nan", "rounds=20", "tool_timeout_seconds_max=9"]
)
def test_what_is_no_ceiling_stops_the_start(text: str) -> None:
    with pytest.raises(ValueError, match="PAWL_LIMIT_CEILINGS"):
        settings(text)  # pyright: ignore[reportCallIssue]


def test_a_deployment_s_ceilings_are_those_of_tools() -> None:
    limits = settings("tool_timeout_seconds=600").run_defaults.limits
    assert (limits.seconds_of_tool(599), limits.seconds_of_tool(0)) == (599, 10)
