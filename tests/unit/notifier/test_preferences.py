"""Quiet hours, and what is done with a delivery that is due (NOTE-1)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import InvalidField
from pawl.notifier.domain.delivery import DeliveryState, Due, plan
from pawl.notifier.domain.notification import NotificationKind, NotificationKinds
from pawl.notifier.domain.preferences import (
    Preferences,
    PreferencesChange,
    QuietHours,
    QuietTimes,
    Weekday,
    quiet_until,
)

NIGHT = QuietHours(start="22:00", end="07:00")
WEEKEND = QuietHours(start="00:00", end="00:00", days=(Weekday.SATURDAY, Weekday.SUNDAY))
BERLIN = QuietTimes(hours=(NIGHT,), time_zone="Europe/Berlin")
DUE = Due(
    type="run.completed",
    is_confirmed=True,
    code_is_over=False,
    emails=0,
    is_asked=False,
    was_claimed=False,
    enabled=True,
    is_muted=False,
    is_read=False,
    is_over=False,
    is_watched=False,
    after_seconds=0,
    tries=0,
    create_time=datetime(2026, 5, 1, tzinfo=UTC),
    was_put_off=False,
    preferences=Preferences(),
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


NIGHT_TIME = at("2026-05-01T23:00")


@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2026-05-01T19:59:59", None),
        ("2026-05-01T20:00", "2026-05-02T05:00"),  # 22:00 in summer.
        ("2026-05-02T04:59:59", "2026-05-02T05:00"),
        ("2026-05-02T05:00", None),
        ("2026-01-01T20:30", None),  # 21:30 in winter.
        ("2026-01-01T21:30", "2026-01-02T06:00"),
        ("2026-03-28T23:00", "2026-03-29T05:00"),  # Clocks go forward in that night.
        ("2026-10-24T23:00", "2026-10-25T06:00"),  # And back in that one.
    ],
)
def test_nights_are_quiet_by_the_clock_of_the_zone(now: str, until: str | None) -> None:
    assert quiet_until(BERLIN, at(now)) == (at(until) if until else None)


@pytest.mark.parametrize(
    ("start", "end", "now", "until"),
    [
        ("02:10", "02:50", "2026-10-25T00:20", "2026-10-25T00:50"),
        ("02:10", "02:50", "2026-10-25T00:50", None),
        ("02:10", "02:50", "2026-10-25T01:20", "2026-10-25T01:50"),  # The second time.
        ("22:00", "02:30", "2026-10-24T23:00", "2026-10-25T01:30"),
        ("02:10", "02:50", "2026-03-29T01:20", None),  # 03:20, and never 02:10.
        ("02:30", "03:15", "2026-03-29T00:59", None),
        ("02:30", "03:15", "2026-03-29T01:00", "2026-03-29T01:15"),  # From the jump on.
        ("22:00", "02:30", "2026-03-28T23:00", "2026-03-29T01:00"),
    ],
)
def test_quiet_hours_hold_both_times_and_end_at_the_jump(start: str, end: str, now: str, until: str | None) -> None:
    quiet = replace(BERLIN, hours=(QuietHours(start=start, end=end),))
    assert quiet_until(quiet, at(now)) == (at(until) if until else None)


def test_quiet_hours_that_meet_end_with_the_last() -> None:
    both = QuietTimes(hours=(NIGHT, WEEKEND))
    assert quiet_until(both, at("2026-05-01T22:30")) == at("2026-05-04T07:00"), "Friday night to Monday morning"
    assert quiet_until(replace(both, hours=(WEEKEND,)), at("2026-05-01T22:30")) is None


def test_quiet_hours_begin_on_their_days_only() -> None:
    monday = QuietTimes(hours=(replace(NIGHT, days=(Weekday.MONDAY,)),))
    assert quiet_until(monday, at("2026-05-05T06:00")) == at("2026-05-05T07:00"), "Tuesday, of Monday's night"
    assert quiet_until(monday, at("2026-05-05T23:00")) is None


@given(
    st.lists(
        st.builds(
            QuietHours,
            start=st.times().map(lambda time: time.strftime("%H:%M")),
            end=st.times().map(lambda time: time.strftime("%H:%M")),
            days=st.sets(st.sampled_from(Weekday)).map(tuple),
        ),
        max_size=10,
    ),
    st.sampled_from(["", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "Pacific/Apia"]),
    st.datetimes(datetime(2020, 1, 1), datetime(2030, 1, 1)),  # noqa: DTZ001  # given its zone below
)
def test_quiet_hours_end_later_and_within_days_whatever_they_are(
    hours: list[QuietHours], zone: str, now: datetime
) -> None:
    quiet = QuietTimes(hours=tuple(hours), time_zone=zone)
    PreferencesChange(quiet=quiet).check()
    until = quiet_until(quiet, now.replace(tzinfo=UTC))
    assert until is None or timedelta(0) < until - now.replace(tzinfo=UTC) < timedelta(days=10)


@pytest.mark.parametrize(
    "change",
    [
        *(
            PreferencesChange(quiet=QuietTimes(time_zone=zone))
            for zone in ("Mars/Olympus", "../../etc/passwd", "Europe", "x" * 10_000)
        ),
        *(
            PreferencesChange(quiet=QuietTimes(hours=(replace(NIGHT, end=end),)))
            for end in ("", "7:00", "24:00", "07:00:00", "07:00+01:00", "07:00\x00", "\u0660\u0667:00")
        ),
        PreferencesChange(quiet=QuietTimes(hours=(NIGHT,) * 11)),
        PreferencesChange(quiet=QuietTimes(hours=(replace(NIGHT, days=(Weekday.MONDAY,) * 2),))),
        PreferencesChange(kinds=NotificationKinds(kinds=(NotificationKind.RUN_FAILED,) * 2)),
    ],
)
def test_preferences_without_a_meaning_are_refused(change: PreferencesChange) -> None:
    with pytest.raises(InvalidField):
        change.check()


def test_a_zone_that_is_known_no_longer_is_read_as_utc() -> None:
    assert quiet_until(replace(BERLIN, time_zone="Europe/Atlantis"), NIGHT_TIME) == at("2026-05-02T07:00")


def test_what_is_muted_or_not_wanted_is_skipped_and_what_is_quiet_waits() -> None:
    failures = Preferences(kinds=(NotificationKind.RUN_FAILED,), quiet=QuietTimes(hours=(NIGHT,)))
    muted = replace(DUE, is_muted=True, preferences=failures)
    unwanted = replace(DUE, preferences=failures)
    assert [plan(due, NIGHT_TIME).state for due in (muted, unwanted)] == [DeliveryState.SKIPPED] * 2
    assert plan(muted, NIGHT_TIME).reason != plan(unwanted, NIGHT_TIME).reason
    failed = replace(unwanted, type="run.failed")
    assert plan(failed, NIGHT_TIME).until_time == at("2026-05-02T07:00")
    assert plan(failed, at("2026-05-02T07:00")).sends
    assert plan(replace(muted, is_asked=True), NIGHT_TIME).sends, "whatever preferences say"
    assert plan(replace(muted, was_claimed=True), NIGHT_TIME).sends, "a try that was lost is counted"
    assert plan(replace(muted, enabled=False), NIGHT_TIME).state is DeliveryState.DEAD


def test_what_waits_is_skipped_once_it_was_read_or_watched_or_is_over_and_what_is_told_at_once_is_not() -> None:
    now = DUE.create_time
    later = replace(DUE, after_seconds=600)
    assert plan(later, now).until_time == now + timedelta(seconds=600)
    assert plan(later, now + timedelta(seconds=600)).sends
    assert plan(replace(later, tries=1), now).sends, "its pause is over"
    for done in ({"is_read": True}, {"is_over": True}, {"is_watched": True}):
        assert plan(replace(DUE, **done), now).sends  # type: ignore[arg-type]  # two flags
        for waits in (later, replace(later, tries=1), replace(DUE, was_put_off=True)):
            assert plan(replace(waits, **done), now).state is DeliveryState.SKIPPED  # type: ignore[arg-type]
