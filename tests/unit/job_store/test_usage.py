"""Which usage figures a caller sees, and how changes are counted. The sums are tested with the ledger's model."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from pawl.chassis.identity.auth import Principal, user_principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied
from pawl.job_store.ledger.rules.usage import UNKNOWN_TOOL, UsageKey, Used, added, month_end
from pawl.job_store.usage.rules import Period, dimensions, scope, times
from pawl.values import CallState, Usage
from tests.unit.job_store.world import World, change

NOW = datetime(2026, 3, 31, 12, 30, tzinfo=UTC)
ANN, ADMIN, DEPLOYMENT = (
    user_principal(StoreId("acme"), UserId("ann"), frozenset(roles)) for roles in ((), {Role.ADMIN}, {Role.DEPLOYMENT})
)


@pytest.mark.parametrize(
    ("caller", "asked", "seen"),
    [
        (ANN, ("", ""), ("acme", "ann")),
        (ANN, ("acme", "ann"), ("acme", "ann")),
        (ANN, ("", "bob"), None),
        (ANN, ("beta", ""), None),
        (ADMIN, ("", ""), ("acme", "")),
        (ADMIN, ("", "bob"), ("acme", "bob")),
        (ADMIN, ("beta", ""), None),
        (DEPLOYMENT, ("", ""), ("", "")),
        (DEPLOYMENT, ("beta", "bob"), ("beta", "bob")),
    ],
)
def test_callers_see_their_own_figures_or_those_they_administer(
    caller: Principal, asked: tuple[str, str], seen: tuple[str, str] | None
) -> None:
    store_id, user_id = StoreId(asked[0]), UserId(asked[1])
    if seen is None:
        with pytest.raises(PermissionDenied):
            scope(caller, store_id, user_id)
    else:
        assert scope(caller, store_id, user_id) == seen


def test_periods_are_full_hours_or_days() -> None:
    day, hour = datetime(2026, 3, 31, tzinfo=UTC), datetime(2026, 3, 31, 12, tzinfo=UTC)
    west = NOW.astimezone(timezone(-timedelta(hours=5)))
    assert times(None, None, Period.WHOLE, NOW) == (day - timedelta(days=30), day + timedelta(days=1))
    assert times(west, west + timedelta(seconds=1), Period.DAY, NOW) == (day, day + timedelta(days=1))
    assert times(None, None, Period.HOUR, NOW) == (hour - timedelta(days=1), hour + timedelta(hours=1))
    oldest = day - timedelta(days=34)
    assert times(oldest, hour, Period.HOUR, NOW) == (oldest, hour)
    bad: list[tuple[datetime | None, datetime | None, Period]] = [
        (day, day, Period.DAY),
        (NOW, day, Period.WHOLE),
        (oldest - timedelta(microseconds=1), None, Period.HOUR),
    ]
    for start, end, period in bad:
        with pytest.raises(InvalidField):
            times(start, end, period, NOW)
    assert times(None, datetime.max.replace(tzinfo=UTC), Period.HOUR, NOW)[1].year == 9999


@pytest.mark.parametrize("numbers", [[0], [6], [2, 2]])
def test_unknown_or_repeated_dimensions_are_refused(numbers: list[int]) -> None:
    assert dimensions([5, 1]) == (1, 5)
    with pytest.raises(InvalidField):
        dimensions(numbers)


def test_calls_to_tools_that_the_run_does_not_have_are_counted_together(world: World, run_id: str) -> None:
    """A model can make up any number of names."""
    for name, version in (("a", 1), ("made_up", 0), ("made_up_too", 0)):
        world.commit(run_id, calls=[change(name, CallState.FAILED, tool_name=name, tool_version=version)])
    figures = {key.tool_name: used.calls_failed for key, used in added(world.unit, lambda _: Usage())}
    assert figures == {"": 0, "a": 1, UNKNOWN_TOOL: 2}


def test_figures_cover_utc_hours_and_model_names_are_shortened() -> None:
    west = datetime(2026, 1, 31, 23, tzinfo=timezone(-timedelta(hours=5)))
    key = UsageKey.at(west, StoreId("acme"), "clerk", UserId("ann"), model="m\0" * 200)
    assert (key.day.isoformat(), key.hour, key.model) == ("2026-02-01", 4, "m" * 128)
    assert Used.by_model(Usage(input_tokens=-3)).plus(Used(runs=1, input_tokens=4)) == Used(runs=1, input_tokens=1)


def test_months_end_with_their_last_day_in_utc() -> None:
    late = datetime(2026, 12, 31, 23, 30, tzinfo=timezone(timedelta(hours=-2)))
    assert month_end(late) == datetime(2027, 2, 1, tzinfo=UTC)
    assert month_end(datetime(2028, 2, 29, tzinfo=UTC)) == datetime(2028, 3, 1, tzinfo=UTC)
