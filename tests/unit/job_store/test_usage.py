"""Daily usage counts of agents."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from functools import reduce

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.job_store.ledger.rules import usage
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.usage import Used
from pawl.values import RunState

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


def test_changes_without_usage_add_nothing() -> None:
    row = run(used=Used(input_tokens=7))
    assert usage.added([], [(row, replace(row, state=RunState.RUNNING))], read, NOW) == []
    assert usage.added([], [(row, replace(row, usage=packed(Used(input_tokens=7))))], read, NOW) == []


def test_an_imported_history_does_not_count_as_usage() -> None:
    assert usage.added([replace(run(used=Used(input_tokens=7)), imported=True)], [], read, NOW) == []


def test_usage_days_are_utc_days() -> None:
    west = datetime(2026, 1, 31, 23, tzinfo=timezone(-timedelta(hours=5)))
    ((key, _),) = usage.added([run()], [], read, west)
    assert key.day == date(2026, 2, 1)
