"""Usage figures, computed from the changes of a group of operations. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

import msgspec

from pawl.chassis.ids import RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.rows import CallRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, Usage

# Number of days for which hourly figures are kept, and for which daily sums are kept.
HOURS_DAYS_MAX: Final = 35
DAYS_MAX: Final = 400
# The name for all tools that a run did not have, because a model can invent any number of names.
UNKNOWN_TOOL: Final = "?"
_MODEL_CHARACTERS_MAX: Final = 128
_MILLISECOND: Final = timedelta(milliseconds=1)


class UsageKey(msgspec.Struct, frozen=True, order=True):
    """The key of a row of figures. A row about calls has a tool, and a row about model calls has a model."""

    store_id: StoreId
    agent_name: str
    day: date
    hour: int
    user_id: UserId
    tool_name: str = ""
    model: str = ""

    @classmethod
    def of(cls, run: RunRow, now: datetime, *, tool_name: str = "", model: str = "") -> UsageKey:
        return cls.at(now, run.store_id, run.agent_name, run.user_id, tool_name=tool_name, model=model)

    @classmethod
    def at(
        cls, now: datetime, store_id: StoreId, agent_name: str, user_id: UserId, *, tool_name: str = "", model: str = ""
    ) -> UsageKey:
        now = now.astimezone(UTC)
        tool_name, model = tool_name.replace("\0", ""), model.replace("\0", "")[:_MODEL_CHARACTERS_MAX]
        return cls(store_id, agent_name, now.date(), now.hour, user_id, tool_name, model)


class Used(Usage, frozen=True, kw_only=True):
    """Figures about runs, calls and model calls. Negative values correct earlier ones. See `schema.sql`."""

    runs: int = 0
    runs_completed: int = 0
    runs_failed: int = 0
    runs_cancelled: int = 0
    runs_expired: int = 0
    rounds: int = 0
    run_milliseconds: int = 0
    calls_succeeded: int = 0
    calls_failed: int = 0
    calls_refused: int = 0
    call_milliseconds: int = 0

    def plus(self, other: Used) -> Used:
        return Used(**{name: getattr(self, name) + getattr(other, name) for name in Used.__struct_fields__})

    @classmethod
    def by_model(cls, usage: Usage) -> Used:
        return cls(**msgspec.structs.asdict(usage))

    @classmethod
    def by_run_end(cls, run: RunRow) -> Used:
        return cls(
            rounds=run.round,
            run_milliseconds=_milliseconds(run.create_time, run.end_time),
            **{f"runs_{run.state.name.lower()}": 1},
        )

    @classmethod
    def by_call_end(cls, call: CallRow) -> Used:
        return cls(
            call_milliseconds=_milliseconds(call.start_time, call.end_time), **{_FIGURE_OF.get(call.state, _REFUSED): 1}
        )


_REFUSED: Final = "calls_refused"
_FIGURE_OF: Final = {
    CallState.SUCCEEDED: "calls_succeeded",
    CallState.DETACHED: "calls_succeeded",
    CallState.FAILED: "calls_failed",
    CallState.OUTCOME_UNKNOWN: "calls_failed",
}


def _milliseconds(start: datetime | None, end: datetime | None) -> int:
    return 0 if start is None or end is None else max(0, (end - start) // _MILLISECOND)


def day_of(now: datetime) -> date:
    return now.astimezone(UTC).date()


def day_end(now: datetime) -> datetime:
    return datetime.combine(day_of(now) + timedelta(days=1), time.min, UTC)


def month_end(now: datetime) -> datetime:
    later = day_of(now).replace(day=1) + timedelta(days=32)
    return datetime.combine(later.replace(day=1), time.min, UTC)


def started_runs(unit: UnitOfWork) -> list[RunRow]:
    """Return the runs that the operations created, except imported histories."""
    return [run for run in unit.runs.created() if not run.imported]


def ended_runs(unit: UnitOfWork) -> list[RunRow]:
    ended = [run for before, run in unit.runs.changed() if run.state.is_terminal and not before.state.is_terminal]
    return ended + [run for run in started_runs(unit) if run.state.is_terminal]


def ended_calls(unit: UnitOfWork) -> list[CallRow]:
    ended = [call for before, call in unit.calls.changed() if call.state.is_terminal and not before.state.is_terminal]
    return ended + [call for call in unit.calls.created() if call.state.is_terminal]


def added(unit: UnitOfWork, usage_of: Callable[[bytes], Usage]) -> Sequence[tuple[UsageKey, Used]]:
    """Return the amounts that the operations add to the figures, in key order.

    `usage_of` returns the usage of a run's own model calls. The usage of its child runs counts towards those runs.
    """
    found: dict[UsageKey, Used] = {}

    def add(run: RunRow, used: Used, *, tool_name: str = "", model: str = "") -> None:
        key = UsageKey.of(run, unit.now, tool_name=tool_name, model=model)
        before = found.get(key)
        found[key] = used if before is None else before.plus(used)

    for run in started_runs(unit):
        add(run, Used(runs=1))
    for run in ended_runs(unit):
        add(run, Used.by_run_end(run))
    for change in unit.usage.rows:
        usage = usage_of(change.after) - usage_of(change.before)
        if usage != Usage():
            add(change.run, Used.by_model(usage), model=change.model)
    for call in ended_calls(unit):
        if (of_call := unit.runs.get(RunKey(call.store_id, call.run_id))) is not None:
            add(of_call, Used.by_call_end(call), tool_name=call.tool_name if call.tool_version else UNKNOWN_TOOL)
    return sorted(found.items())
