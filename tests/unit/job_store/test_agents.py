"""Rules for saving versions and drafts of agents."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import AgentCycle, AgentNotFound, TooLarge
from pawl.job_store.agents import rules as agents
from pawl.job_store.agents.rules import AgentRow, AgentVersionRow, drafted, saved


def version(name: str = "a", definition: bytes = b"d", *tools: str, number: int = 0) -> AgentVersionRow:
    return AgentVersionRow(
        store_id=StoreId("acme"),
        name=name,
        version=number,
        definition=definition,
        tool_names=tools,
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
        create_user_id=UserId("ann"),
    )


def test_a_changed_definition_becomes_the_next_version() -> None:
    first = saved(version(), (), {}, None)
    assert first.version == 1
    there = {"a": AgentRow(name="a", version=1)}
    assert saved(version(), (), there, first) is first
    assert saved(version("a", b"e"), (), there, first).version == 2
    assert saved(version("a", b"d", "look"), (), there, first).version == 2, "a new match needs a new version"


def test_a_recreated_agent_continues_its_version_numbers() -> None:
    first = replace(version(), version=1)
    gone = {"a": AgentRow(name="a", version=1, is_deleted=True)}
    assert saved(version(), (), gone, first).version == 2


def test_an_agent_delegates_only_to_existing_agents() -> None:
    there = {"b": AgentRow(name="b", version=1), "c": AgentRow(name="c", version=1, is_deleted=True)}
    assert saved(version(), ("b",), there, None).version == 1
    for name in ("c", "nobody"):
        with pytest.raises(AgentNotFound, match=name):
            saved(version(), (name,), there, None)


def test_a_delegation_cycle_is_reported_with_its_path() -> None:
    there = {
        "b": AgentRow(name="b", version=1, delegates_to=("c",)),
        "c": AgentRow(name="c", version=1, delegates_to=("x", "a")),
        "x": AgentRow(name="x", version=1),
    }
    with pytest.raises(AgentCycle, match="a -> b -> c -> a"):
        saved(version(), ("x", "b"), there, None)
    with pytest.raises(AgentCycle, match="a -> a"):
        saved(version(), ("a",), there, None)


def test_agents_and_versions_of_a_store_are_limited() -> None:
    live = {f"a{number}": AgentRow(name=f"a{number}", version=1) for number in range(agents.AGENTS_MAX)}
    with pytest.raises(TooLarge, match="delete one"):
        saved(version("new"), (), live, None)
    kept = {f"a{number}": AgentRow(name=f"a{number}", version=1, is_deleted=True) for number in range(1000)}
    with pytest.raises(TooLarge, match="reuse one of their names"):
        saved(version("new"), (), kept, None)
    assert saved(version("a1"), (), kept, version("a1", number=1)).version == 2
    full = {"a": AgentRow(name="a", version=agents.VERSIONS_MAX)}
    with pytest.raises(TooLarge, match="another name"):
        saved(version(), (), full, version("a", b"other", number=agents.VERSIONS_MAX))


def test_a_draft_counts_its_changes() -> None:
    first = drafted(version(), (), {}, {})
    assert first.version == 1
    assert drafted(version(), (), {}, {"a": first}) is first
    assert drafted(version("a", b"e"), (), {}, {"a": first}).version == 2
    full = {f"d{number}": version(f"d{number}", number=1) for number in range(agents.DRAFTS_MAX)}
    with pytest.raises(TooLarge, match="delete one"):
        drafted(version(), (), {}, full)
    assert drafted(version("d1", b"e"), (), {}, full).version == 2


def test_a_draft_is_validated_like_the_agent_with_its_name() -> None:
    there = {
        "b": AgentRow(name="b", version=1, delegates_to=("a",)),
        "c": AgentRow(name="c", version=1, is_deleted=True),
    }
    assert drafted(version("x"), ("b",), there, {}).version == 1
    with pytest.raises(AgentCycle, match="a -> b -> a"):
        drafted(version("a"), ("b",), there, {})
    with pytest.raises(AgentNotFound, match="'c'"):
        drafted(version("a"), ("c",), there, {})
