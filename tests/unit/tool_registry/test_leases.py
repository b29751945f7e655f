"""Leases of others, by the clock of the process that watches them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pawl.tool_registry.domain.leases import LeaseWatch

END = datetime(2026, 1, 1, tzinfo=UTC)
JUMP = timedelta(seconds=130)


def see(watch: LeaseWatch, seconds: float, **ends: datetime) -> list[str]:
    """Show the leases at that time; gives who is said to have none any more."""
    watch.see(ends, asked_at=seconds, now=seconds)
    return watch.unrenewed()[0]


def test_a_lease_ends_when_nobody_has_renewed_it_for_a_whole_one() -> None:
    watch = LeaseWatch(6)
    assert [see(watch, second, a=END, b=END) for second in range(6)] == [[]] * 6
    assert see(watch, 6, a=END, b=END + JUMP) == ["a"]
    assert watch.unrenewed() == (["a"], [END])
    assert see(watch, 7, b=END + JUMP) == []


def test_a_renewal_counts_whichever_way_the_clock_has_jumped() -> None:
    watch = LeaseWatch(6)
    for second in range(6):
        assert see(watch, second, a=END) == []
    assert see(watch, 6, a=END - JUMP) == []
    assert [see(watch, second, a=END - JUMP) for second in range(7, 12)] == [[]] * 5
    assert see(watch, 12, a=END - JUMP) == ["a"]


def test_time_in_which_the_record_was_away_does_not_count() -> None:
    """Who holds a lease could not renew it then."""
    watch = LeaseWatch(6)
    for second in range(6):
        see(watch, second, a=END)
    assert see(watch, 60, a=END) == []
    assert [see(watch, 60 + second, a=END) for second in (2, 4, 6)] == [[], [], ["a"]]


def test_an_answer_that_took_long_may_be_from_its_beginning() -> None:
    watch = LeaseWatch(6)
    watch.see({"a": END}, asked_at=0, now=2)
    watch.see({"a": END}, asked_at=3, now=9)
    assert watch.unrenewed() == ([], [])
    assert [see(watch, second, a=END) for second in (6, 7.9, 8)] == [[], [], ["a"]]
