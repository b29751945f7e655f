"""Rules for saving versions and drafts of agents, and their daily usage counts."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial, reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.errors import AgentCycle, AgentNotFound, TooLarge
from pawl.job_store.agents.rules import AGENT, DRAFTS_MAX, drafted
from pawl.job_store.ledger.rules import usage
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.usage import Used, month_end
from pawl.job_store.versions import rules as versions
from pawl.job_store.versions.rules import DefinitionRow, VersionRow
from pawl.values import RunState

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


NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
NOTHING = Used()
FIGURES = st.builds(Used, **dict.fromkeys(set(Used.__struct_fields__) - {"runs"}, st.integers(0, 10**6)))


def run(number: int = 1, user: str = "ann", agent: str = "clerk", used: Used = NOTHING) -> RunRow:
    return RunRow(
        store_id=StoreId("acme"),
        run_id=RunId(f"run_{number}"),
        conversation_id=ConversationId("conv"),
        user_id=UserId(user),
        state=RunState.QUEUED,
        token_budget=0,
        token_ceiling=0,
        queued_message=None,
        options=b"",
        create_time=NOW,
        update_time=NOW,
        state_time=NOW,
        agent_name=agent,
        usage=packed(used),
    )


def packed(used: Used) -> bytes:
    return msgspec.msgpack.encode(used)


def read(data: bytes) -> Used:
    return msgspec.msgpack.decode(data, type=Used)


@given(st.lists(st.tuples(st.sampled_from(["ann", "bob"]), st.sampled_from(["clerk", "default"]), FIGURES, FIGURES)))
def test_usage_counts_are_the_sum_of_the_changes(runs: list[tuple[str, str, Used, Used]]) -> None:
    created = [run(number, user, agent, used) for number, (user, agent, used, _) in enumerate(runs)]
    changed = [(row, replace(row, usage=packed(after))) for row, (_, _, _, after) in zip(created, runs, strict=True)]
    counts = usage.added(created, [], read, NOW), usage.added([], changed, read, NOW)
    for part in counts:
        keys = [key for key, _ in part]
        assert keys == sorted(set(keys)), "each once, in one order"
    for user in ("ann", "bob"):
        for agent in ("clerk", "default"):
            own = [row for row in runs if row[:2] == (user, agent)]
            found = [used for part in counts for key, used in part if (key.user_id, key.agent_name) == (user, agent)]
            used = reduce(Used.plus, (after for *_, after in own), Used(runs=len(own)))
            assert reduce(Used.plus, found, NOTHING) == used


def test_changes_without_usage_do_not_add_anything() -> None:
    row = run(used=Used(input_tokens=7))
    assert usage.added([], [(row, replace(row, state=RunState.RUNNING))], read, NOW) == []
    assert usage.added([], [(row, replace(row, usage=packed(Used(input_tokens=7))))], read, NOW) == []


def test_an_imported_history_does_not_count_as_usage() -> None:
    assert usage.added([replace(run(used=Used(input_tokens=7)), imported=True)], [], read, NOW) == []


def test_months_end_with_their_last_day_in_utc() -> None:
    late = datetime(2026, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-2)))
    assert month_end(late) == datetime(2027, 2, 1, tzinfo=UTC)
    assert month_end(datetime(2028, 2, 29, tzinfo=UTC)) == datetime(2028, 3, 1, tzinfo=UTC)


def test_usage_days_are_utc_days() -> None:
    west = datetime(2026, 1, 31, 23, tzinfo=timezone(-timedelta(hours=5)))
    ((key, _),) = usage.added([run()], [], read, west)
    assert key.day == date(2026, 2, 1)
