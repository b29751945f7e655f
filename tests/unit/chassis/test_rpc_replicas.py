"""Which replica a call goes to: the one that its store prefers, as long as that answers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from pawl.chassis.rpc_replicas import CALLS_MAX, Standing, choose, key_of, preference
from pawl.job.v1 import ledger_pb2, schedules_pb2
from pawl.tool.v1 import execution_pb2

names = st.integers(min_value=1, max_value=200).map("10.0.0.{}:7603".format)
standings = st.builds(
    Standing,
    name=names,
    is_connected=st.booleans(),
    is_away=st.booleans(),
    is_busy=st.booleans(),
    calls=st.integers(min_value=0, max_value=2 * CALLS_MAX),
)
replicas = st.lists(standings, min_size=1, max_size=6, unique_by=lambda replica: replica.name)
well = replicas.map(lambda many: [Standing(name=one.name) for one in many])


@given(st.text(), replicas, st.randoms())
def test_all_callers_prefer_the_same_in_whatever_order_they_know_them(
    key: str, known: list[Standing], chance: Random
) -> None:
    mixed = list(known)
    chance.shuffle(mixed)
    found, other = (
        [many[at].name for at in preference(key, tuple(one.name for one in many))] for many in (known, mixed)
    )
    assert found == other
    assert sorted(found) == sorted(one.name for one in known)


@given(st.text(), well, st.integers(min_value=0, max_value=5))
def test_one_that_goes_moves_only_its_own_stores(key: str, known: list[Standing], gone: int) -> None:
    assume(len(known) > 1)
    at = choose(key, known)
    left = [one for number, one in enumerate(known) if number != gone % len(known)]
    if at != gone % len(known):
        assert left[choose(key, left)] == known[at]
    away = [replace(one, is_away=number == gone % len(known)) for number, one in enumerate(known)]
    assert away[choose(key, away)].name == left[choose(key, left)].name


@given(st.text(), replicas)
def test_none_is_chosen_while_a_better_one_is_there(key: str, known: list[Standing]) -> None:
    at = known[choose(key, known)]
    reached = [one for one in known if one.is_connected and not one.is_away]
    free = [one for one in reached if not one.is_busy and one.calls < CALLS_MAX]
    if free:
        assert at in free
    elif reached:
        assert at in reached
        assert at.calls == min(one.calls for one in reached if one.is_busy == at.is_busy)
        assert not at.is_busy or all(one.is_busy for one in reached)
    else:
        assert not at.is_away or all(one.is_away for one in known)
        # One that is silent may be slow; one that cannot be reached serves nobody.
        assert at.is_connected or not at.is_away or not any(one.is_connected for one in known)


@given(st.text(), well)
def test_a_few_calls_more_or_less_move_nothing(key: str, known: list[Standing]) -> None:
    at = choose(key, known)
    assert choose(key, [replace(one, calls=CALLS_MAX - 1) for one in known]) == at
    full = [replace(one, calls=CALLS_MAX if number == at else 0) for number, one in enumerate(known)]
    assert (choose(key, full) == at) == (len(known) == 1)


def test_stores_are_spread() -> None:
    known = tuple(f"10.0.0.{number}:7603" for number in range(3))
    first = Counter(preference(f"store-{number}", known)[0] for number in range(3000))
    assert all(900 < count < 1100 for count in first.values())


def test_a_call_belongs_to_the_store_or_worker_that_it_names_within_what_it_is_about() -> None:
    acme = schedules_pb2.ScheduleOwner(store_id="acme")
    due = schedules_pb2.DueSchedule(owner=acme)
    message = ledger_pb2.SubmitMessageRequest(store_id="acme")
    requests: list[tuple[Any, str]] = [
        (ledger_pb2.CommitRunRequest(store_id="acme"), "acme"),
        (execution_pb2.CheckCallsRequest(context=execution_pb2.CallContext(store_id="acme")), "acme"),
        (ledger_pb2.ClaimRunsRequest(worker_id="wrk_1"), "wrk_1"),
        (execution_pb2.CheckAnswerRequest(), ""),
        (schedules_pb2.PutScheduleRequest(owner=acme), "acme"),
        (schedules_pb2.FireScheduleRequest(due=due, refusal="no agent"), "acme"),
        (schedules_pb2.FireScheduleRequest(message=message), "acme"),
        (ledger_pb2.StartRunRequest(message=message), "acme"),
        (schedules_pb2.FireScheduleRequest(), ""),
    ]
    assert [key_of(request) for request, _ in requests] == [key for _, key in requests]
