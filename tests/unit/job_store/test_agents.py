"""Rules for saving versions and drafts of agents."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import AgentCycle, AgentNotFound, TooLarge
from pawl.job_store.agents.rules import AGENT, DRAFTS_MAX, drafted
from pawl.job_store.versions import rules as versions
from pawl.job_store.versions.rules import DefinitionRow, VersionRow

saved = partial(versions.saved, AGENT)


def version(name: str = "a", content: bytes = b"d", *, number: int = 0) -> VersionRow:
    return VersionRow(
        store_id=StoreId("acme"),
        name=name,
        version=number,
        content=content,
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
        create_user_id=UserId("ann"),
    )


def test_a_changed_definition_becomes_the_next_version() -> None:
    first = saved(version(), (), {}, None)
    assert first.version == 1
    there = {"a": DefinitionRow(name="a", version=1)}
    assert saved(version(), (), there, first) is first
    assert saved(version("a", b"e"), (), there, first).version == 2


def test_a_recreated_agent_continues_its_version_numbers() -> None:
    first = replace(version(), version=1)
    gone = {"a": DefinitionRow(name="a", version=1, is_deleted=True)}
    assert saved(version(), (), gone, first).version == 2


def test_an_agent_delegates_only_to_existing_agents() -> None:
    there = {"b": DefinitionRow(name="b", version=1), "c": DefinitionRow(name="c", version=1, is_deleted=True)}
    assert saved(version(), ("b",), there, None).version == 1
    for name in ("c", "nobody"):
        with pytest.raises(AgentNotFound, match=name):
            saved(version(), (name,), there, None)


def test_a_delegation_cycle_is_reported_with_its_path() -> None:
    there = {
        "b": DefinitionRow(name="b", version=1, uses=("c",)),
        "c": DefinitionRow(name="c", version=1, uses=("x", "a")),
        "x": DefinitionRow(name="x", version=1),
    }
    with pytest.raises(AgentCycle, match="a -> b -> c -> a"):
        saved(version(), ("x", "b"), there, None)
    with pytest.raises(AgentCycle, match="a -> a"):
        saved(version(), ("a",), there, None)


def test_agents_and_versions_of_a_store_are_limited() -> None:
    live = {f"a{number}": DefinitionRow(name=f"a{number}", version=1) for number in range(versions.LIVE_MAX)}
    with pytest.raises(TooLarge, match="delete one"):
        saved(version("new"), (), live, None)
    kept = {f"a{number}": DefinitionRow(name=f"a{number}", version=1, is_deleted=True) for number in range(1000)}
    with pytest.raises(TooLarge, match="reuse one of their names"):
        saved(version("new"), (), kept, None)
    assert saved(version("a1"), (), kept, version("a1", number=1)).version == 2
    full = {"a": DefinitionRow(name="a", version=versions.VERSIONS_MAX)}
    with pytest.raises(TooLarge, match="another name"):
        saved(version(), (), full, version("a", b"other", number=versions.VERSIONS_MAX))


def test_a_draft_counts_its_changes() -> None:
    first = drafted(version(), (), {}, {})
    assert first.version == 1
    assert drafted(version(), (), {}, {"a": first}) is first
    assert drafted(version("a", b"e"), (), {}, {"a": first}).version == 2
    full = {f"d{number}": version(f"d{number}", number=1) for number in range(DRAFTS_MAX)}
    with pytest.raises(TooLarge, match="delete one"):
        drafted(version(), (), {}, full)
    assert drafted(version("d1", b"e"), (), {}, full).version == 2


def test_a_draft_is_validated_like_the_agent_with_its_name() -> None:
    there = {
        "b": DefinitionRow(name="b", version=1, uses=("a",)),
        "c": DefinitionRow(name="c", version=1, is_deleted=True),
    }
    assert drafted(version("x"), ("b",), there, {}).version == 1
    with pytest.raises(AgentCycle, match="a -> b -> a"):
        drafted(version("a"), ("b",), there, {})
    with pytest.raises(AgentNotFound, match="'c'"):
        drafted(version("a"), ("c",), there, {})
