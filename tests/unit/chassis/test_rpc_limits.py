"""Requests on their way in are bounded, for each caller and in all."""

from __future__ import annotations

import asyncio

import pytest

from pawl.chassis import rpc_limits
from pawl.chassis.auth import Principal, service_principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.rpc_limits import Arrivals, Crowd
from pawl.errors import DeadlineExceeded, PawlError


class Slow:
    """Contexts whose requests arrive when the test says so."""

    def __init__(self) -> None:
        self.asked = 0
        self.arrived = asyncio.Event()

    async def read(self) -> bytes:
        self.asked += 1
        await self.arrived.wait()
        return b"here"


def user(name: str, store_id: str = "acme") -> Principal:
    return Principal(store_id=StoreId(store_id), user_id=UserId(name))


async def turn_over() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_requests_of_one_caller_are_asked_for_a_few_at_a_time() -> None:
    arrivals, slow, others = Arrivals(), Slow(), Slow()
    reading = [asyncio.ensure_future(arrivals.read(slow, user("ann"))) for _ in range(50)]
    await turn_over()
    few = slow.asked
    assert 0 < few < 50
    beside = [
        asyncio.ensure_future(arrivals.read(others, who)) for who in (user("bob"), service_principal("agent-loop"))
    ]
    await turn_over()
    assert (slow.asked, others.asked) == (few, 2)
    slow.arrived.set()
    others.arrived.set()
    assert set(await asyncio.gather(*reading, *beside)) == {b"here"}


async def test_many_callers_have_no_more_than_so_many_in_all_and_keep_another_store_from_nothing() -> None:
    arrivals, slow, others = Arrivals(), Slow(), Slow()
    reading = [asyncio.ensure_future(arrivals.read(slow, user(f"u{number}"))) for number in range(500)]
    await turn_over()
    assert 0 < slow.asked < 500
    beside = asyncio.ensure_future(arrivals.read(others, user("bob", "other")))
    await turn_over()
    assert others.asked == 1
    for task in reading[:400]:
        task.cancel()
    slow.arrived.set()
    others.arrived.set()
    await asyncio.gather(*reading, beside, return_exceptions=True)
    assert await arrivals.read(slow, user("ann")) == b"here"


class Ended:
    """Calls that remember how they ended."""

    reason: PawlError | None = None

    def end(self, reason: PawlError) -> None:
        self.reason = reason


def test_who_holds_most_of_a_full_room_makes_room_for_the_next() -> None:
    crowd, alone, many, late = Crowd(10), Ended(), [Ended() for _ in range(50)], Ended()
    crowd.enter(alone, "a")
    for call in many:
        crowd.enter(call, "b")
    crowd.enter(late, "c")
    assert len(crowd) == 10
    assert (alone.reason, late.reason) == (None, None)
    assert [call for call in many if call.reason is None] == many[-8:]
    for call in (*many, alone, late):
        crowd.leave(call)
    assert len(crowd) == 0


async def test_a_request_that_does_not_arrive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_limits, "_ARRIVAL_SECONDS", 0.01)
    with pytest.raises(DeadlineExceeded):
        await Arrivals().read(Slow(), user("ann"))
