"""Lines and places of which each key has its share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.shares import Places, Shares

ITEMS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers()))


def filled(items: list[tuple[str, int]]) -> Shares[str, tuple[str, int]]:
    shares = Shares[str, tuple[str, int]]()
    for item in items:
        shares.put(item[0], item)
    return shares


@given(items=ITEMS)
def test_all_come_once_and_those_of_one_key_in_their_order(items: list[tuple[str, int]]) -> None:
    shares = filled(items)
    assert len(shares) == len(items)
    taken = [shares.take() for _ in items]
    for key in "abcd":
        assert [item for item in taken if item[0] == key] == [item for item in items if item[0] == key]
    assert not shares
    with pytest.raises(LookupError):
        shares.take()


@given(items=ITEMS)
def test_between_two_of_a_key_each_other_key_that_waits_has_its_turn(items: list[tuple[str, int]]) -> None:
    shares = filled(items)
    taken = [shares.take()[0] for _ in items]
    for place, key in enumerate(taken):
        later = taken[place + 1 :]
        if key in later:
            between = later[: later.index(key)]
            assert sorted(between) == sorted(set(later) - {key})


@given(before=ITEMS, more=st.integers(0, 50))
def test_whoever_comes_waits_for_at_most_one_of_each_other_key(before: list[tuple[str, int]], more: int) -> None:
    shares = filled([item for item in before if item[0] != "d"])
    keys = {item[0] for item in before} - {"d"}
    shares.put("d", ("d", 0))
    for number in range(more):
        shares.put("a", ("a", number))
    taken = [shares.take()[0] for _ in range(len(shares))]
    assert taken.index("d") <= len(keys)


async def test_a_key_has_half_of_the_places_that_others_leave_and_each_is_free_when_its_work_has_ended() -> None:
    places = Places(8)
    works = {key: [asyncio.get_running_loop().create_future() for _ in range(9)] for key in "abcd"}
    entering = []
    for key, started in works.items():

        async def enter(key: str, work: asyncio.Future[None]) -> str:
            await places.enter(key)
            places.leave_after(work, key)
            return key

        entering += [asyncio.create_task(enter(key, work)) for work in started]
        await asyncio.sleep(0)
    assert [each.result() for each in entering if each.done()] == [*"aaaa", "b", "b", "c", "d"]
    assert (places.free, places.has_room("e")) == (0, False)
    works["d"][0].set_exception(OSError())
    works["c"][0].cancel()
    await asyncio.sleep(0)
    assert places.has_room("e")
    for work in (work for started in works.values() for work in started if not work.done()):
        work.set_result(None)
    await asyncio.gather(*entering)
    assert places.free == 8
