"""Computes agents' daily usage from the runs before and after a group of operations. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

import msgspec

from pawl.chassis.ids import StoreId, UserId
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import Usage

# Number of days that are kept and can be queried.
DAYS_MAX: Final = 400


class UsageKey(msgspec.Struct, frozen=True, order=True):
    store_id: StoreId
    agent_name: str
    day: date
    user_id: UserId


class Used(Usage, frozen=True, kw_only=True):
    """The numbers of runs started and tokens used. Negative values correct earlier counts."""

    runs: int = 0

    def plus(self, other: Used, times: int = 1) -> Used:
        names = Used.__struct_fields__
        return Used(**{name: getattr(self, name) + times * getattr(other, name) for name in names})


def day_of(now: datetime) -> date:
    """Return the UTC date of `now`."""
    return now.astimezone(UTC).date()


def day_end(now: datetime) -> datetime:
    """Return the end of the UTC day that `now` falls on."""
    return datetime.combine(day_of(now) + timedelta(days=1), time.min, UTC)


def month_end(now: datetime) -> datetime:
    """Return the end of the month (UTC) of a time."""
    later = day_of(now).replace(day=1) + timedelta(days=32)
    return datetime.combine(later.replace(day=1), time.min, UTC)


def started_runs(unit: UnitOfWork) -> list[RunRow]:
    """Return the runs that the operations created, without imported histories."""
    return [run for run in unit.runs.created() if not run.imported]


def ended_runs(unit: UnitOfWork) -> list[RunRow]:
    ended = [run for before, run in unit.runs.changed() if run.state.is_terminal and not before.state.is_terminal]
    return ended + [run for run in started_runs(unit) if run.state.is_terminal]


def ended_calls(unit: UnitOfWork) -> list[CallRow]:
    ended = [call for before, call in unit.calls.changed() if call.state.is_terminal and not before.state.is_terminal]
    return ended + [call for call in unit.calls.created() if call.state.is_terminal]


def added(
    created: Iterable[RunRow],
    changed: Iterable[tuple[RunRow, RunRow]],
    usage_of: Callable[[bytes], Used],
    now: datetime,
) -> Sequence[tuple[UsageKey, Used]]:
    """Return what runs add to the day's counts, in key order. `changed` contains (before, after) pairs.

    Imported histories are not counted.
    """
    found: dict[UsageKey, Used] = {}

    def add(run: RunRow, used: Used) -> None:
        if used != Used() and not run.imported:
            key = UsageKey(run.store_id, run.agent_name, day_of(now), run.user_id)
            found[key] = found.get(key, Used()).plus(used)

    for run in created:
        add(run, usage_of(run.usage).plus(Used(runs=1)))
    for before, run in changed:
        if before.usage is not run.usage:
            add(run, usage_of(run.usage).plus(usage_of(before.usage), -1))
    return sorted(found.items())
