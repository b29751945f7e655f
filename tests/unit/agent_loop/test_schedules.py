"""The firing of schedules that are due: whatever becomes of one, the others fire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_values import DueSchedule, ScheduledMessage
from pawl.agent_loop.app.schedules import Schedules
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.app.starting_ports import ScheduleLedger
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CredentialId, RequestId, StoreId, UserId
from pawl.errors import AgentNotFound, DependencyUnavailable, InvalidField, Overloaded, PawlError
from tests.fakes.manual_clock import ManualClock

ANN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))


def due(text: str) -> DueSchedule:
    message = ScheduledMessage(text=text, agent="", labels={}, conversation_key="")
    return DueSchedule(caller=ANN, message=message, document=None)


class Ledger:
    """Gives each batch of schedules once, and takes down what is fired."""

    def __init__(self, *batches: Sequence[DueSchedule] | PawlError, wait_seconds: float = 1.0) -> None:
        self._batches = list(batches)
        self._wait_seconds = wait_seconds
        self.fired: list[tuple[str, str]] = []

    async def claim_schedules(self, schedules_max: int) -> tuple[Sequence[DueSchedule], float]:
        batch = self._batches.pop(0) if self._batches else ()
        if isinstance(batch, PawlError):
            raise batch
        return batch, self._wait_seconds if not self._batches else 0.0

    async def fire_schedule(
        self,
        one: DueSchedule,
        message: object,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> Any:
        if one.message.text == "away":
            raise DependencyUnavailable
        self.fired.append((one.message.text, refusal))
        return one if one.message.text != "stale" else None


class Checks:
    """Refuses messages by their text."""

    def __init__(self, refusals: dict[str, Exception]) -> None:
        self._refusals = refusals

    async def checked(self, caller: Principal, request_id: RequestId, message: Any, *, must_exist: bool) -> Any:
        if message.text in self._refusals:
            raise self._refusals[message.text]
        return message, None


def firing_of(ledger: Ledger, checks: Checks, clock: ManualClock) -> Schedules:
    return Schedules(
        ledger=cast("ScheduleLedger", ledger),
        starting=Starting(cast("Messages", checks), lambda caller: caller.credential_id == "file-gone"),
        clock=clock,
    )


async def played(ledger: Ledger, clock: ManualClock, seconds: float, **refusals: Exception) -> None:
    schedules = firing_of(ledger, Checks(refusals), clock)
    firing = asyncio.create_task(schedules.fire_forever())
    await clock.advance(seconds)
    firing.cancel()
    await asyncio.gather(firing, return_exceptions=True)


async def test_what_cannot_be_started_is_refused_with_its_reason(clock: ManualClock) -> None:
    ledger = Ledger([due("gone"), due("wrong"), due("good")])
    await played(ledger, clock, 0.5, gone=AgentNotFound(), wrong=InvalidField("no", field="text"))
    reasons = {text: refusal.partition(":")[0] for text, refusal in ledger.fired}
    assert reasons == {"gone": "AGENT_NOT_FOUND", "wrong": "INVALID_FIELD", "good": ""}


async def test_with_a_key_that_is_gone_from_its_file_nothing_is_started(clock: ManualClock) -> None:
    gone = Principal(store_id=ANN.store_id, user_id=ANN.user_id, credential_id=CredentialId("file-gone"))
    ledger = Ledger([replace(due("look"), caller=gone), due("see")])
    await played(ledger, clock, 0.5)
    assert {text: refusal.partition(":")[0] for text, refusal in ledger.fired} == {
        "look": "PERMISSION_DENIED",
        "see": "",
    }


@pytest.mark.parametrize("error", [DependencyUnavailable(), Overloaded(), RuntimeError("a fault")])
async def test_what_says_nothing_about_a_schedule_refuses_no_run(clock: ManualClock, error: Exception) -> None:
    ledger = Ledger([due("bad"), due("away"), due("good")], [due("bad")], [due("later")])
    await played(ledger, clock, 0.5, bad=error)
    assert ledger.fired == [("good", ""), ("later", "")]


async def test_a_ledger_that_is_away_is_asked_again(clock: ManualClock) -> None:
    ledger = Ledger(DependencyUnavailable(), [due("good")])
    await played(ledger, clock, 0.5)
    assert ledger.fired == []
    ledger = Ledger(DependencyUnavailable(), [due("good")])
    await played(ledger, clock, 1.5)
    assert ledger.fired == [("good", "")]


async def test_each_due_time_of_the_past_has_a_request_of_its_own(clock: ManualClock) -> None:
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]

    class Past(Ledger):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[tuple[datetime | None, RequestId]] = []

        async def get_schedule(self, caller: Principal, name: str) -> tuple[object, DueSchedule]:
            return None, due("look")

        async def past_times(self, caller: Principal, name: str, begin: datetime, end: datetime) -> Sequence[datetime]:
            return times

        async def fire_schedule(
            self, *_: object, request_id: RequestId, backfill_time: datetime | None = None, **__: object
        ) -> Any:
            self.requests.append((backfill_time, request_id))
            return backfill_time

    ledger = Past()
    schedules = firing_of(ledger, Checks({}), clock)
    for request_id in ("r", "r", "other", ""):
        assert await schedules.backfill(ANN, "x", times[0], times[1], RequestId(request_id)) == times
    assert ledger.requests[:2] == ledger.requests[2:4]
    assert len(set(ledger.requests)) == 6
    assert ledger.requests[6:] == [(time, "") for time in times]


async def test_a_trigger_gives_up_when_the_schedule_changes_all_the_time(clock: ManualClock) -> None:
    class Changing(Ledger):
        async def get_schedule(self, caller: Principal, name: str) -> tuple[object, DueSchedule]:
            return None, due("stale")

    ledger = Changing()
    schedules = firing_of(ledger, Checks({}), clock)
    with pytest.raises(DependencyUnavailable):
        await schedules.trigger(ANN, "x", RequestId("r"))
    assert len(ledger.fired) > 1
