"""The fate of a delivery after each try, and which may be tried at once (NOTE-1)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import RunId, StoreId, UserId
from pawl.errors import InvalidField
from pawl.notifier.domain.channel import Channel, ChannelId, checked
from pawl.notifier.domain.delivery import (
    AGES,
    FAILING_MAX,
    FAILING_TRIES_MAX,
    JITTER,
    TRIES_MAX_AT_ONCE,
    Candidate,
    DeliveryId,
    DeliveryState,
    Outcome,
    Verdict,
    body_of,
    choose,
    crowded,
    judge,
    notice,
)
from pawl.notifier.domain.notification import Draft, EventId, Inbox, NotificationId, NotificationKind

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
def test_a_delivery_that_fails_is_tried_over_a_day_at_the_times_that_are_promised(each: list[float]) -> None:
    age = 0.0
    for number, chance in enumerate(each[:-1], 1):
        verdict = judged(FAILED, number=number, chance=chance)
        assert verdict.state is DeliveryState.WAITING
        assert verdict.retry_seconds is not None
        assert verdict.retry_seconds > 0
        age += verdict.retry_seconds
        assert AGES[number] * (1 - JITTER) <= age * 1.000001
        assert age <= AGES[number] * (1 + JITTER) * 1.000001
    assert judged(FAILED, number=len(AGES)).state is DeliveryState.DEAD


@pytest.mark.parametrize("status", [429, 503])
def test_a_receiver_that_is_busy_is_tried_no_sooner_than_it_asks(status: int) -> None:
    def pause(number: int, seconds: float) -> float | None:
        return judged(Outcome(status=status, retry_after_seconds=seconds), number=number).retry_seconds

    assert [pause(1, 0), pause(1, 4), pause(1, 60)] == [5, 5, 60]
    assert pause(1, 1e9) == AGES[-1] - AGES[-2]
    assert pause(7, 1e9) == AGES[7] - AGES[6], "the schedule has a longer pause here"
    assert judged(Outcome(status=500, retry_after_seconds=60), number=1).retry_seconds == 5


@given(statuses, tries, st.booleans(), st.booleans(), st.floats(0, 30))
def test_every_try_has_one_end(status: int, number: int, is_test: bool, enabled: bool, days: float) -> None:
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
        (1, 30, False, False),  # It is tried again.
        (1, 30, True, False),
    ],
)
def test_a_channel_is_disabled_when_a_delivery_is_given_up_and_none_came_through_for_days(
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
def test_no_place_gets_more_than_it_may_and_what_is_left_over_has_a_full_one(
    due: list[Candidate], before: list[Candidate]
) -> None:
    at_work = choose(before, [])
    chosen = choose(due, at_work)
    taken = Counter(place for each in [*at_work, *chosen] for place in each.places.items())
    assert all(count <= TRIES_MAX_AT_ONCE[name] for (name, _), count in taken.items())
    failing = Counter(each.channel_id for each in [*at_work, *chosen] if each.is_failing)
    assert all(count <= FAILING_TRIES_MAX for count in failing.values())
    left = Counter(due) - Counter(chosen)
    full = {place for place, count in taken.items() if count == TRIES_MAX_AT_ONCE[place[0]]}
    assert all(full & set(each.places.items()) or failing[each.channel_id] for each in left)


@pytest.mark.parametrize("name", ["a" * 200, ""])
def test_the_title_of_a_notice_has_its_reason_however_long_the_name_is(name: str) -> None:
    disabled = replace(CHANNEL, name=name, disable_reason="it is gone")
    title = notice(ANN, disabled, DeliveryId("dlv"), NOW).title
    assert title.startswith(f"Channel {name[:10] or 'hook_1'}")
    assert title.endswith(" was disabled: it is gone")
    assert len(title) <= 200


def test_a_host_with_enough_at_work_is_crowded() -> None:
    most = TRIES_MAX_AT_ONCE["host"]
    assert crowded(["a"] * most + ["b"] * (most - 1), "host") == ["a"]


def test_the_body_says_what_the_inbox_says() -> None:
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


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "a" * 201},
        {"name": "a\nb"},
        {"url": ""},
        {"url": "https://example.com/" + "a" * 2048},
        {"kinds": (NotificationKind.RUN_FAILED,) * 2},
    ],
    ids=str,
)
def test_a_channel_without_meaning_is_refused(changes: dict[str, object]) -> None:
    values = {"channel_id": CHANNEL.channel_id, "name": CHANNEL.name, "url": CHANNEL.url} | changes
    with pytest.raises(InvalidField):
        checked(Channel(**values))  # type: ignore[arg-type]
    assert checked(CHANNEL) == replace(CHANNEL, after_seconds=0)
