"""Deliveries: retries, and the preferences of users (NOTE-1)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.errors import InvalidField
from pawl.notifier.channels.rules import Channel, ChannelId, checked
from pawl.notifier.deliveries.rules import (
    AGES,
    FAILING_MAX,
    FAILING_TRIES_MAX,
    JITTER,
    TRIES_MAX_AT_ONCE,
    Candidate,
    DeliveryId,
    DeliveryState,
    Due,
    Outcome,
    Verdict,
    body_of,
    choose,
    judge,
    notice,
    plan,
)
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationId, NotificationKind, NotificationKinds
from pawl.notifier.preferences.rules import Preferences, PreferencesChange, QuietHours, QuietTimes, Weekday, quiet_until
from tests.tables import for_each, not_refused

NOW = datetime(2026, 5, 1, tzinfo=UTC)
ANN = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
FAILED = Outcome(status=500)
CHANNEL = Channel(channel_id=ChannelId("hook_1"), name="", url="https://example.com")

chances = st.floats(0, 1)
tries = st.integers(1, 20)
statuses = st.integers(0, 599)


def judged(
    outcome: Outcome, *, number: int, chance: float = 0.5, is_test: bool = False, enabled: bool = True, days: float = 0
) -> Verdict:
    since = NOW - timedelta(days=days)
    return judge(outcome, tries=number, is_test=is_test, enabled=enabled, failing_since=since, now=NOW, chance=chance)


@given(st.lists(chances, min_size=len(AGES), max_size=len(AGES)))
def test_a_failed_delivery_is_retried_over_a_day_at_the_promised_times(each: list[float]) -> None:
    age = 0.0
    for number, chance in enumerate(each[:-1], 1):
        verdict = judged(FAILED, number=number, chance=chance)
        assert verdict.state is DeliveryState.WAITING
        assert verdict.retry_seconds
        age += verdict.retry_seconds
        assert AGES[number] * (1 - JITTER) <= age * 1.000001 <= AGES[number] * (1 + JITTER) * 1.000002
    assert judged(FAILED, number=len(AGES)).state is DeliveryState.DEAD


@pytest.mark.parametrize("status", [429, 503])
def test_the_retry_after_header_of_a_busy_receiver_is_honoured(status: int) -> None:
    def pause(number: int, seconds: float) -> float | None:
        return judged(Outcome(status=status, retry_after_seconds=seconds), number=number).retry_seconds

    longest = AGES[-1] - AGES[-2]
    assert [pause(1, seconds) for seconds in (0, 4, 60, 1e9)] == [5, 5, 60, longest]
    assert pause(7, 1e9) == AGES[7] - AGES[6], "the schedule has a longer pause here"
    assert judged(Outcome(status=500, retry_after_seconds=60), number=1).retry_seconds == 5


@given(statuses, tries, st.booleans(), st.booleans(), st.floats(0, 30))
def test_every_attempt_has_one_outcome(status: int, number: int, is_test: bool, enabled: bool, days: float) -> None:
    verdict = judged(Outcome(status=status), number=number, is_test=is_test, enabled=enabled, days=days)
    assert (verdict.state is DeliveryState.DELIVERED) == (200 <= status < 300)
    assert (verdict.retry_seconds is not None) == (verdict.state is DeliveryState.WAITING)
    assert verdict.state is DeliveryState.DEAD or not verdict.disable_reason
    assert (is_test or not enabled) <= (verdict.state is not DeliveryState.WAITING)
    assert (status == 410) <= bool(verdict.disable_reason)


@pytest.mark.parametrize(
    ("number", "days", "is_test", "disables"),
    [
        (len(AGES), FAILING_MAX.days, False, True),
        (len(AGES), FAILING_MAX.days - 0.01, False, False),
        (1, 30, False, False),  # It is retried.
        (1, 30, True, False),
    ],
)
def test_a_channel_is_disabled_after_days_without_a_delivery(
    number: int, days: float, is_test: bool, disables: bool
) -> None:
    assert bool(judged(FAILED, number=number, days=days, is_test=is_test).disable_reason) == disables


candidates = st.builds(
    lambda host, user, store, is_failing: Candidate(
        delivery_id=DeliveryId("dlv"),
        channel_id=ChannelId(f"{host}/{user}/{store}/{is_failing}"),
        inbox=Inbox(store_id=StoreId(store), user_id=UserId(user)),
        host=host,
        is_failing=is_failing,
    ),
    st.sampled_from(["hangs", "b", "c"]),
    st.sampled_from(["ann", "bob"]),
    st.sampled_from(["acme", "other", "third"]),
    st.booleans(),
)


@given(st.lists(candidates, max_size=300), st.lists(candidates, max_size=100))
def test_deliveries_are_deferred_exactly_when_a_limit_is_reached(due: list[Candidate], before: list[Candidate]) -> None:
    in_progress = choose(before, [])
    chosen = choose(due, in_progress)
    used = Counter(slot for each in [*in_progress, *chosen] for slot in each.slots.items())
    assert all(count <= TRIES_MAX_AT_ONCE[name] for (name, _), count in used.items())
    failing = Counter(each.channel_id for each in [*in_progress, *chosen] if each.is_failing)
    assert all(count <= FAILING_TRIES_MAX for count in failing.values())
    left = Counter(due) - Counter(chosen)
    full = {slot for slot, count in used.items() if count == TRIES_MAX_AT_ONCE[slot[0]]}
    assert all(full & set(each.slots.items()) or failing[each.channel_id] for each in left)


def test_the_body_matches_the_inbox_entry() -> None:
    draft = Draft(
        inbox=ANN,
        notification_id=NotificationId("ntf_1"),
        kind=NotificationKind.RUN_COMPLETED,
        run_id=RunId("run_1"),
        event_id=EventId("evt_1"),
        title="Run completed",
        body="It is 391. \N{SNOWMAN}",
        create_time=NOW,
    )
    assert json.loads(body_of(draft)) == {
        "type": "run.completed",
        "timestamp": "2026-05-01T00:00:00Z",
        "data": {
            "notification_id": "ntf_1",
            "store_id": "acme",
            "user_id": "ann",
            "run_id": "run_1",
            "event_id": "evt_1",
            "title": "Run completed",
            "body": "It is 391. \N{SNOWMAN}",
        },
    }


def test_an_invalid_channel_is_refused() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a" * 201},
        {"name": "a\nb"},
        {"url": ""},
        {"url": "https://example.com/" + "a" * 2048},
        {"kinds": (NotificationKind.RUN_FAILED,) * 2},
    ]
    assert not_refused(InvalidField, lambda changes: checked(replace(CHANNEL, **changes)), rows) == []
    assert checked(CHANNEL) == replace(CHANNEL, after_seconds=0)
    for name in ("a" * 200, ""):
        title = notice(ANN, replace(CHANNEL, name=name, disable_reason="it is gone"), DeliveryId("dlv"), NOW).title
        assert title.startswith(f"Channel {name[:10] or 'hook_1'}")
        assert (title.endswith(" was disabled: it is gone"), len(title) <= 200) == (True, True)


NIGHT = QuietHours(start="22:00", end="07:00")
WEEKEND = QuietHours(start="00:00", end="00:00", days=(Weekday.SATURDAY, Weekday.SUNDAY))
BERLIN = QuietTimes(hours=(NIGHT,), time_zone="Europe/Berlin")
DUE = Due(
    type="run.completed",
    is_confirmed=True,
    code_is_void=False,
    emails=0,
    is_requested=False,
    was_claimed=False,
    enabled=True,
    is_muted=False,
    is_read=False,
    is_resolved=False,
    is_watched=False,
    after_seconds=0,
    tries=0,
    create_time=datetime(2026, 5, 1, tzinfo=UTC),
    was_delayed=False,
    preferences=Preferences(),
)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


NIGHT_TIME = at("2026-05-01T23:00")


@for_each(
    ("start", "end", "now", "until"),
    [
        ("22:00", "07:00", "2026-05-01T19:59:59", None),
        ("22:00", "07:00", "2026-05-01T20:00", "2026-05-02T05:00"),  # 22:00 in summer.
        ("22:00", "07:00", "2026-05-02T04:59:59", "2026-05-02T05:00"),
        ("22:00", "07:00", "2026-05-02T05:00", None),
        ("22:00", "07:00", "2026-01-01T20:30", None),  # 21:30 in winter.
        ("22:00", "07:00", "2026-01-01T21:30", "2026-01-02T06:00"),
        ("22:00", "07:00", "2026-03-28T23:00", "2026-03-29T05:00"),  # Clocks go forward in this night.
        ("22:00", "07:00", "2026-10-24T23:00", "2026-10-25T06:00"),  # Clocks go back in this night.
        ("02:10", "02:50", "2026-10-25T00:20", "2026-10-25T00:50"),
        ("02:10", "02:50", "2026-10-25T00:50", None),
        ("02:10", "02:50", "2026-10-25T01:20", "2026-10-25T01:50"),  # The second occurrence.
        ("22:00", "02:30", "2026-10-24T23:00", "2026-10-25T01:30"),
        ("02:10", "02:50", "2026-03-29T01:20", None),  # 03:20: 02:10 does not exist.
        ("02:30", "03:15", "2026-03-29T00:59", None),
        ("02:30", "03:15", "2026-03-29T01:00", "2026-03-29T01:15"),  # From the clock change on.
        ("22:00", "02:30", "2026-03-28T23:00", "2026-03-29T01:00"),
    ],
)
def test_quiet_hours_follow_the_time_zone_and_its_clock_changes(
    start: str, end: str, now: str, until: str | None
) -> None:
    quiet = replace(BERLIN, hours=(QuietHours(start=start, end=end),))
    assert quiet_until(quiet, at(now)) == (at(until) if until else None)


@for_each(
    ("hours", "now", "until"),
    [
        ((NIGHT, WEEKEND), "2026-05-01T22:30", "2026-05-04T07:00"),  # Friday night to Monday morning.
        ((WEEKEND,), "2026-05-01T22:30", None),
        ((replace(NIGHT, days=(Weekday.MONDAY,)),), "2026-05-05T06:00", "2026-05-05T07:00"),  # Of Monday's night.
        ((replace(NIGHT, days=(Weekday.MONDAY,)),), "2026-05-05T23:00", None),
    ],
)
def test_quiet_hours_start_only_on_their_days_and_adjacent_ones_end_with_the_last(
    hours: tuple[QuietHours, ...], now: str, until: str | None
) -> None:
    assert quiet_until(QuietTimes(hours=hours), at(now)) == (at(until) if until else None)


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
def test_quiet_hours_always_end_later_and_within_days(hours: list[QuietHours], zone: str, now: datetime) -> None:
    quiet = QuietTimes(hours=tuple(hours), time_zone=zone)
    PreferencesChange(quiet=quiet).check()
    until = quiet_until(quiet, now.replace(tzinfo=UTC))
    assert until is None or timedelta(0) < until - now.replace(tzinfo=UTC) < timedelta(days=10)


def test_invalid_preferences_are_refused() -> None:
    changes = [
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
    ]
    assert not_refused(InvalidField, PreferencesChange.check, changes) == []


def test_an_unknown_time_zone_is_read_as_utc() -> None:
    assert quiet_until(replace(BERLIN, time_zone="Europe/Atlantis"), NIGHT_TIME) == at("2026-05-02T07:00")


def test_muted_or_unwanted_deliveries_are_skipped_while_deliveries_in_quiet_hours_wait() -> None:
    failures = Preferences(kinds=(NotificationKind.RUN_FAILED,), quiet=QuietTimes(hours=(NIGHT,)))
    muted = replace(DUE, is_muted=True, preferences=failures)
    unwanted = replace(DUE, preferences=failures)
    assert [plan(due, NIGHT_TIME).state for due in (muted, unwanted)] == [DeliveryState.SKIPPED] * 2
    assert plan(muted, NIGHT_TIME).reason != plan(unwanted, NIGHT_TIME).reason
    failed = replace(unwanted, type="run.failed")
    assert plan(failed, NIGHT_TIME).until_time == at("2026-05-02T07:00")
    assert plan(failed, at("2026-05-02T07:00")).sends
    assert plan(replace(muted, is_requested=True), NIGHT_TIME).sends, "regardless of preferences"
    assert plan(replace(muted, was_claimed=True), NIGHT_TIME).sends, "a lost attempt counts"
    assert plan(replace(muted, enabled=False), NIGHT_TIME).state is DeliveryState.DEAD


def test_only_delayed_deliveries_are_skipped_once_they_have_been_read_or_settled() -> None:
    now = DUE.create_time
    later = replace(DUE, after_seconds=600)
    assert plan(later, now).until_time == now + timedelta(seconds=600)
    assert plan(later, now + timedelta(seconds=600)).sends
    assert plan(replace(later, tries=1), now).sends, "its pause is over"
    for done in ({"is_read": True}, {"is_resolved": True}, {"is_watched": True}):
        assert plan(replace(DUE, **done), now).sends  # type: ignore[arg-type]  # two flags
        for waits in (later, replace(later, tries=1), replace(DUE, was_delayed=True)):
            assert plan(replace(waits, **done), now).state is DeliveryState.SKIPPED  # type: ignore[arg-type]
