"""The order in which operations are written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import StoreId
from pawl.job_store.ledger.group_commit import WORK_MAX, Lane, Lanes

# Lane, store, number and size; size 0 means that the caller has gone.
Waiting = tuple[Lane, str, int, int]

WAITING = st.lists(st.tuples(st.sampled_from(Lane), st.sampled_from("abc"), st.integers(0, 30)), max_size=300)


def filled(drawn: list[tuple[Lane, str, int]]) -> Lanes[Waiting]:
    lanes = Lanes[Waiting]()
    for number, (lane, store, size) in enumerate(drawn):
        lanes.put(lane, StoreId(store), (lane, store, number, size))
    return lanes


def groups(lanes: Lanes[Waiting], *, operations_max: int = 128, bytes_max: int = 10_000) -> list[list[Waiting]]:
    found = []
    while lanes:
        found.append(lanes.next_group(lambda each: each[3], operations_max=operations_max, bytes_max=bytes_max))
    return found


@given(drawn=WAITING, operations_max=st.integers(64, 128), bytes_max=st.integers(1, 2000))
def test_operations_are_written_once_and_in_order_in_bounded_groups(
    drawn: list[tuple[Lane, str, int]], operations_max: int, bytes_max: int
) -> None:
    found = groups(filled(drawn), operations_max=operations_max, bytes_max=bytes_max)
    assert sorted(each[2] for group in found for each in group) == [n for n, each in enumerate(drawn) if each[2]]
    for lane in Lane:
        for store in "abc":
            numbers = [each[2] for group in found for each in group if each[:2] == (lane, store)]
            assert numbers == sorted(numbers)
    for group in found:
        assert len(group) <= operations_max
        assert sum(each[3] for each in group[:-1]) < bytes_max


@given(people=st.integers(0, 300), work=st.integers(0, 300))
def test_user_requests_come_first_but_work_keeps_its_quota(people: int, work: int) -> None:
    lanes = filled([(Lane.PEOPLE, "a", 1)] * people + [(Lane.WORK, "a", 1)] * work)
    group = [each[0] for each in lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=10_000)]
    assert group == sorted(group, key=lambda lane: lane is Lane.WORK)
    if people:
        assert group.count(Lane.WORK) == min(work, WORK_MAX)
        assert group.count(Lane.PEOPLE) == min(people, 128 - min(work, WORK_MAX))
    else:
        assert len(group) == min(work, 128)


def test_large_user_messages_leave_room_for_work() -> None:
    lanes = filled([(Lane.PEOPLE, "a", 40)] * 5 + [(Lane.WORK, "b", 1)])
    group = lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=100)
    assert [each[0] for each in group] == [Lane.PEOPLE, Lane.PEOPLE, Lane.WORK]


@given(noise=st.integers(0, 1000), lane=st.sampled_from(Lane), others=st.integers(0, 60))
def test_a_busy_store_does_not_delay_others(noise: int, lane: Lane, others: int) -> None:
    lanes = filled([(lane, "noisy", 1)] * noise)
    for number in range(others):
        lanes.put(lane, StoreId(f"quiet-{number}"), (lane, "quiet", number, 1))
    group = lanes.next_group(lambda each: each[3], operations_max=128, bytes_max=10_000)
    assert sum(each[1] == "quiet" for each in group) == others
