"""Due times, catch-up and state of schedules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CredentialId, RequestId, StoreId, UserId
from pawl.errors import InvalidField, TooLarge
from pawl.job_store.schedules import timing
from pawl.job_store.schedules.rules import (
    FIRES_MAX,
    SCHEDULES_MAX,
    Definition,
    FireOutcome,
    FireRow,
    Owner,
    ScheduleRow,
    judge,
    put,
    resumed,
    saved,
    with_ending,
    with_fire,
)
from pawl.job_store.schedules.timing import Timing
from pawl.job_store.triggers import rules as triggers
from pawl.values import Overlap, RunState
from tests.tables import for_each

BERLIN = "Europe/Berlin"
SPRING = datetime(2026, 3, 29, 0, 0, tzinfo=UTC)
# An hour before Berlin's clocks jump from 2 to 3, and two before they go back from 3 to 2.
AUTUMN = datetime(2026, 10, 24, 23, 0, tzinfo=UTC)
LORD_HOWE = "Australia/Lord_Howe"
LORD_HOWE_SPRING = datetime(2026, 10, 3, 14, 0, tzinfo=UTC)

TIMES = st.integers(0, 2 * 365 * 86_400).map(
    lambda seconds: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
)
ZONES = st.sampled_from(["", BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca"])
MINUTES = st.sampled_from(["*", "*/30", "0", "15,45", "7-50/13", "59"])
HOURS = st.sampled_from(["*", "*/2", "0", "1-3", "2", "23"])
CRONS = st.builds(
    lambda minute, hour, zone: Timing(cron=f"{minute} {hour} * * *", time_zone=zone), MINUTES, HOURS, ZONES
)
INTERVALS = st.builds(
    lambda interval, fraction: Timing(interval_seconds=interval, offset_seconds=int(interval * fraction)),
    st.integers(1, 10_000),
    st.floats(0, 0.99),
)


@for_each(
    ("cron", "start", "zone", "expected"),
    [
        # A time that is skipped is due right after.
        ("30 2 * * *", SPRING, BERLIN, ["29 03:00+0200", "30 02:30+0200"]),
        ("*/30 2 * * *", SPRING, BERLIN, ["29 03:00+0200", "30 02:00+0200"]),
        ("15 */2 * * *", SPRING, BERLIN, ["29 03:00+0200", "29 04:15+0200"]),
        # A time that is repeated is due once.
        ("30 2 * * *", AUTUMN, BERLIN, ["25 02:30+0200", "26 02:30+0100"]),
        ("*/30 2 * * *", AUTUMN, BERLIN, ["25 02:00+0200", "25 02:30+0200", "26 02:00+0100"]),
        ("15 */2 * * *", AUTUMN, BERLIN, ["25 02:15+0200", "25 04:15+0100"]),
        # Lord Howe's clocks change by half an hour.
        ("30 * * * *", LORD_HOWE_SPRING, LORD_HOWE, ["04 01:30+1030", "04 02:30+1100", "04 03:30+1100"]),
        ("30 2 * * *", LORD_HOWE_SPRING, LORD_HOWE, ["04 02:30+1100", "05 02:30+1100"]),
    ],
)
def test_daylight_saving_neither_skips_nor_repeats_a_scheduled_time(
    cron: str, start: datetime, zone: str, expected: list[str]
) -> None:
    times = islice(timing.due_times(Timing(cron=cron, time_zone=zone), "x", start), len(expected))
    assert [f"{time.astimezone(timing.zone(zone)):%d %H:%M%z}" for time in times] == expected


@pytest.mark.parametrize("start", [SPRING, AUTUMN])
def test_hourly_schedules_are_unaffected_by_daylight_saving(start: datetime) -> None:
    times = list(islice(timing.due_times(Timing(cron="*/30 * * * *", time_zone=BERLIN), "x", start), 12))
    assert times == [start + timedelta(minutes=30) * number for number in range(1, 13)]


def test_rare_dates_are_found_up_to_thirty_years_ahead() -> None:
    """The search for a day that occurs every 28 or 40 years must not block the event loop."""
    assert [time.year for time in islice(timing.due_times(Timing(cron="0 0 29 2 */7"), "x", SPRING), 10)] == [2032]


@given(st.one_of(CRONS, INTERVALS), TIMES, st.integers(0, 20))
def test_scheduled_times_do_not_depend_on_the_starting_point(
    given_timing: Timing, after: datetime, number: int
) -> None:
    times = list(islice(timing.due_times(given_timing, "x", after), 30))
    assert all(earlier < later for earlier, later in pairwise([after, *times]))
    assert list(islice(timing.due_times(given_timing, "x", times[number]), 29 - number)) == times[number + 1 :]


@given(st.text(min_size=1), st.integers(0, 3600), TIMES)
def test_jitter_is_bounded_and_stable(schedule_id: str, seconds: int, after: datetime) -> None:
    plain = Timing(interval_seconds=7200)
    late = timing.jitter(Timing(interval_seconds=7200, jitter_seconds=seconds), schedule_id)
    assert timedelta(0) <= late <= timedelta(seconds=seconds)
    jittered = timing.due_times(Timing(interval_seconds=7200, jitter_seconds=seconds), schedule_id, after + late)
    assert list(islice(jittered, 5)) == [time + late for time in islice(timing.due_times(plain, "", after), 5)]


@given(INTERVALS, TIMES, st.integers(1, 100_000), st.integers(0, 100_000))
def test_scheduled_times_are_between_the_start_and_the_end(
    given_timing: Timing, after: datetime, start_offset: int, length: int
) -> None:
    start = after + timedelta(seconds=start_offset)
    end = start + timedelta(seconds=length + 1)
    bounded = Timing(
        interval_seconds=given_timing.interval_seconds,
        offset_seconds=given_timing.offset_seconds,
        start_time=start,
        end_time=end,
    )
    times = set(islice(timing.due_times(bounded, "x", after), 50))
    plain = islice(timing.due_times(given_timing, "x", start - timedelta(microseconds=1)), 50)
    assert times == {time for time in plain if start <= time < end}


@given(st.integers(1, 5000), st.integers(1, timing.CATCH_UP_SECONDS_MAX), st.integers(0, 200_000), TIMES)
def test_the_last_hundred_missed_times_in_the_window_are_caught_up(
    interval: int, window: int, late: int, now: datetime
) -> None:
    regular = Timing(interval_seconds=interval, catch_up_seconds=window)
    due = next(timing.due_times(regular, "x", now - timedelta(seconds=late)))
    fired = []
    while due <= now:
        if not timing.is_missed(regular, due, now):
            fired.append(due)
        following = timing.following(regular, "x", due, now)
        assert following is not None
        assert following > due
        due = following
    start = max(now - timedelta(seconds=window), now - timedelta(seconds=late))
    expected = [time for time in islice(timing.due_times(regular, "x", start), 250_000 // interval) if time <= now]
    assert fired[1:] == expected[-len(fired[1:]) :] if fired[1:] else len(expected) <= 1
    assert len(fired) <= timing.CAUGHT_UP_MAX
    assert len(fired) >= min(len(expected), timing.CAUGHT_UP_MAX)


@for_each(
    ("cron", "text"),
    [
        ("0 9 * * 1-5", "At 09:00 on Monday through Friday"),
        ("0 0 1 * 1", "At 00:00 on the first day of month or on Monday"),
    ],
)
def test_a_cron_expression_is_described_in_words(cron: str, text: str) -> None:
    assert timing.cron_text(cron) == text


def test_jitter_never_moves_a_scheduled_time_past_the_end() -> None:
    jittered = Timing(interval_seconds=60, jitter_seconds=3600, end_time=SPRING + timedelta(hours=2))
    late = timing.jitter(jittered, "x")
    assert late > timedelta(minutes=1)
    assert max(timing.due_times(jittered, "x", SPRING)) == SPRING + timedelta(hours=2) - timedelta(minutes=1) + (
        late % timedelta(minutes=1)
    )


def test_past_scheduled_times_are_limited_to_the_range() -> None:
    hourly = Timing(interval_seconds=3600, end_time=SPRING + timedelta(hours=3))
    assert timing.past_times(hourly, "x", SPRING, SPRING + timedelta(hours=2)) == (SPRING, SPRING + timedelta(hours=1))
    assert len(timing.past_times(hourly, "x", SPRING, SPRING + timedelta(days=9))) == 3
    late = Timing(interval_seconds=3600, jitter_seconds=3600)
    (time,) = timing.past_times(late, "x", SPRING, SPRING + timedelta(hours=1))
    assert time - SPRING == timing.jitter(late, "x")
    (leap_day,) = timing.past_times(
        Timing(cron="0 9 29 2 *", time_zone=BERLIN), "x", datetime(2024, 1, 1, tzinfo=UTC), SPRING
    )
    assert leap_day == datetime(2024, 2, 29, 8, tzinfo=UTC)
    with pytest.raises(InvalidField):
        timing.past_times(hourly, "x", SPRING, SPRING)


@pytest.mark.parametrize("start", [datetime(1, 1, 1, tzinfo=UTC), SPRING - timedelta(seconds=101)])
def test_a_past_range_with_over_a_hundred_scheduled_times_is_refused(start: datetime) -> None:
    every_second = Timing(interval_seconds=1)
    assert len(timing.past_times(every_second, "x", SPRING - timedelta(seconds=100), SPRING)) == timing.CAUGHT_UP_MAX
    with pytest.raises(TooLarge):
        timing.past_times(every_second, "x", start, SPRING)
    for zone in ("", "Australia/Lord_Howe"):
        with pytest.raises(TooLarge):
            timing.past_times(Timing(cron="0 * * * *", time_zone=zone), "x", datetime(1, 1, 1, tzinfo=UTC), SPRING)


@pytest.mark.parametrize("name", ["localtime", "posixrules", "right/Europe/Berlin", "posix/Europe/Berlin"])
def test_time_zones_outside_the_iana_list_are_refused(name: str) -> None:
    with pytest.raises(InvalidField, match="IANA"):
        timing.check(Timing(cron="0 9 * * *", time_zone=name))


OWNER = Owner(store_id=StoreId("acme"), user_id=UserId("ann"), credential_id=CredentialId("key_1"))
OTHER_KEY = replace(OWNER, credential_id=CredentialId("key_2"))


def kept(overlap: Overlap = Overlap.SKIP) -> ScheduleRow:
    asked = Definition(name="x", text="x", interval_seconds=60, overlap=overlap)
    return put(None, asked, OWNER, SPRING, new_id="sch", count=0, must_exist=False)


def test_a_pending_scheduled_time_survives_unrelated_edits() -> None:
    row = kept()
    late = SPRING + timedelta(seconds=90)
    for changed in (
        saved(row, replace(row.definition, text="y", catch_up_seconds=7), OWNER, late),
        saved(row, row.definition, OTHER_KEY, late),
        resumed(row, OTHER_KEY, late),
    ):
        assert (changed.due_time, changed.claim_at) == (row.due_time, row.due_time)
        assert changed.generation > row.generation
    moved = saved(row, replace(row.definition, offset_seconds=1), OWNER, late)
    assert moved.due_time == SPRING + timedelta(seconds=121)


def test_resuming_an_active_schedule_replaces_its_key() -> None:
    row = kept()
    assert resumed(row, OTHER_KEY, SPRING).credential_id == "key_2"
    assert resumed(row, OWNER, SPRING) is row


def test_a_pending_scheduled_run_is_not_trimmed() -> None:
    row = kept(Overlap.QUEUE)
    waiting = FireRow(due_time=SPRING, fire_time=SPRING, outcome=FireOutcome.WAITING, request_id=RequestId("r"))
    row = with_fire(row, waiting)
    for number in range(1, 2 * FIRES_MAX):
        time = SPRING + timedelta(minutes=number)
        row = with_fire(row, FireRow(due_time=time, fire_time=time, outcome=FireOutcome.SKIPPED))
    assert (len(row.fires), row.fires[-1]) == (FIRES_MAX, waiting)
    started = FireRow(due_time=SPRING, fire_time=SPRING, outcome=FireOutcome.STARTED)
    assert with_fire(row, started).fires[0].request_id == "r"


@pytest.mark.parametrize(
    ("overlap", "idle", "busy", "busy_and_one_waits"),
    [
        (Overlap.SKIP, "STARTED", "SKIPPED", "SKIPPED"),
        (Overlap.QUEUE, "STARTED", "WAITING", "SKIPPED"),
        (Overlap.ALLOW, "STARTED", "STARTED", "STARTED"),
        (Overlap.CANCEL, "STARTED", "WAITING", "SKIPPED"),
    ],
)
def test_the_overlap_policy_applies_while_the_previous_run_is_active(
    overlap: Overlap, idle: str, busy: str, busy_and_one_waits: str
) -> None:
    definition = Definition(name="x", text="x", interval_seconds=60, overlap=overlap)
    late = SPRING - timedelta(seconds=timing.CATCH_UP_SECONDS)
    for is_busy, has_waiting, outcome in ((False, False, idle), (True, False, busy), (True, True, busy_and_one_waits)):
        for due in (None, SPRING, late + timedelta(seconds=1)):
            found, reason = judge(definition, due, SPRING, is_busy=is_busy, has_waiting=has_waiting)
            assert found is FireOutcome[outcome]
            assert bool(reason) == (found is not FireOutcome.STARTED)
        found, _ = judge(definition, late, SPRING, is_busy=is_busy, has_waiting=has_waiting)
        assert found is FireOutcome.MISSED


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (Timing(), "cron"),
        (Timing(cron="* * * * *", interval_seconds=5), "cron"),
        (Timing(cron="* * * *"), "cron"),
        (Timing(cron="0 * * * * *"), "cron"),
        (Timing(cron="0 0 30 2 *"), "cron"),
        (Timing(cron="0 0 * * ²L"), "cron"),
        (Timing(cron="0 0 * * " + "1," * 200 + "1"), "cron"),
        (Timing(cron="* * * * *", time_zone="../etc"), "time_zone"),
        (Timing(cron="* * * * *", time_zone="Mars"), "time_zone"),
        (Timing(cron="* * * * *", offset_seconds=5), "offset_seconds"),
        (Timing(interval_seconds=5, time_zone=BERLIN), "time_zone"),
        (Timing(interval_seconds=5, offset_seconds=5), "offset_seconds"),
        (Timing(interval_seconds=2**31), "interval_seconds"),
        (Timing(interval_seconds=5, jitter_seconds=3601), "jitter_seconds"),
        (Timing(interval_seconds=5, catch_up_seconds=86_401), "catch_up_seconds"),
        (Timing(interval_seconds=5, start_time=SPRING, end_time=SPRING), "end_time"),
    ],
)
def test_invalid_timings_are_refused_and_name_the_field(wrong: Timing, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        timing.check(wrong)
    assert refused.value.metadata["field"] == f"definition.{field}"


@given(st.text("0123456789*/-,L#MONJAN", max_size=12), st.integers(0, 4))
def test_every_accepted_cron_expression_has_a_next_time(part: str, index: int) -> None:
    parts = ["*"] * 5
    parts[index] = part or "x"
    cron = Timing(cron=" ".join(parts))
    try:
        timing.check(cron)
    except InvalidField:
        return
    assert next(timing.due_times(cron, "x", SPRING)) > SPRING


def test_the_number_of_schedules_and_triggers_per_user_is_limited() -> None:
    schedule, trigger = kept().definition, triggers.TriggerDefinition(name="x", text="x")
    made = {"new_id": "x", "must_exist": False}
    with pytest.raises(TooLarge):
        put(None, schedule, OWNER, SPRING, **made, count=SCHEDULES_MAX)  # type: ignore[arg-type]
    with pytest.raises(TooLarge):
        triggers.put(None, trigger, OWNER, SPRING, **made, secret=b"", count=triggers.TRIGGERS_MAX)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ending", "failures"), [(RunState.FAILED, 3), (RunState.COMPLETED, 0), (RunState.CANCELLED, 2), (None, 2)]
)
def test_each_ended_run_is_counted_once_for_its_schedule(ending: RunState | None, failures: int) -> None:
    """A run that was removed before it was counted is neither a failure nor a success."""
    row = replace(kept(), failures=2, last_run_counted=False)
    assert with_ending(row, RunState.RUNNING) is row
    counted = with_ending(row, ending)
    assert (counted.failures, with_ending(counted, RunState.FAILED)) == (failures, counted)
