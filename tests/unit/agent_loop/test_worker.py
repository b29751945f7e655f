"""A worker: claims, leases, wake-ups, fencing and handover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.ports import Claim, Loaded
from pawl.agent_loop.loop.rules.run import RunFailure
from pawl.agent_loop.loop.run_tasks import WorkerDependencies
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.chassis.ids import RunKey, WorkerId
from pawl.errors import DependencyUnavailable, Internal, LeaseLost
from pawl.server.bus.connection import Bus
from pawl.values import Question, RunState
from tests.fakes.loop_world import World
from tests.fakes.manual_clock import run_in_virtual_time
from tests.fakes.model import Script, calls, says
from tests.fakes.registry import tool
from tests.unit.agent_loop.scenario import at_work, end_of, present


class Hints:
    """A connected bus on which no hint arrives."""

    connected = True

    async def subscribe(self, subject: str, callback: object) -> None: ...


class Undrivable(Drive):
    async def run(self, loaded: Loaded | None = None) -> DriveEnd:
        raise ZeroDivisionError


VERDICTS = {"write": tool(), "ask": tool("ASK", context="HUMAN", question=Question(question="Which?"))}


def long(*, seconds: float = 100.0) -> Script:
    return [seconds, *says("That took long.")]


def while_unavailable(world: World, name: str, is_unavailable: Callable[[], bool] = lambda: True) -> None:
    """Have the ledger refuse requests with this name as long as it is unavailable."""

    async def fault(request: str, done: bool) -> None:
        if request == name and is_unavailable():
            raise DependencyUnavailable

    world.ledger.fault = fault


def count(world: World, *names: str) -> list[str]:
    """Return a list of the requests with these names (or of all) that the ledger gets from now on."""
    asked = list[str]()

    async def note(name: str, done: bool) -> None:
        asked.extend([] if done or name not in (names or {name}) else [name])

    world.ledger.fault = note
    return asked


async def listening(world: World, hints: Hints | None = None) -> Worker:
    worker = world.worker()
    await worker.listen(cast("Bus", hints or Hints()))
    return worker


async def test_many_runs_are_driven_concurrently() -> None:
    world = World(VERDICTS, [])
    keys = [world.ledger.submit(f"hello {number}") for number in range(100)]
    async with at_work(world.worker()):
        for key in keys:
            await end_of(world, key)
    assert (world.meter.left, world.meter.held) == (["ended"] * 100, 0)


async def test_a_run_is_stopped_before_its_lease_ends_if_the_lease_cannot_be_renewed() -> None:
    """I4: another worker may drive it after that."""

    world = World(VERDICTS, [long()])
    key = world.ledger.submit("hello")
    while_unavailable(world, "RenewLeases")
    async with at_work(world.worker()):
        await asyncio.sleep(1)
        lease_end = world.ledger.row(key).claim_at
        while world.model.streaming:
            await asyncio.sleep(0.1)
        assert world.clock.now() < present(lease_end).timestamp()
        assert world.meter.left == ["lost"]


@pytest.mark.parametrize("error", [DependencyUnavailable, Internal, ZeroDivisionError, None])
def test_runs_survive_an_outage_shorter_than_their_leases(error: type[Exception] | None) -> None:
    """A failed or hung renewal is retried soon, so that no model call is paid for twice."""

    async def main(outage_start: float) -> None:
        world = World(VERDICTS, [long(seconds=30.0)])
        key = world.ledger.submit("hello")

        async def fail_during_outage(name: str, done: bool) -> None:
            left = outage_start + 7.0 - world.clock.now()
            if name == "RenewLeases" and 0 < left <= 7.0:
                if error is not None:
                    raise error
                await asyncio.sleep(left)

        world.ledger.fault = fail_during_outage
        async with at_work(world.worker()):
            await end_of(world, key)
        assert (len(world.model.requests), world.meter.left) == (1, ["ended"])

    for tenth in range(0, 20, 3):
        run_in_virtual_time(main(1004.0 + tenth / 10))


async def test_a_run_is_not_driven_twice_while_a_dropped_drive_ends() -> None:
    """Both drives would have the same epoch, so neither would be fenced."""

    world = World(VERDICTS, [long(seconds=30.0), long(seconds=30.0)])
    worker = world.worker()
    worker._limits = WorkerLimits(renew_seconds=0.5)
    new_drive, driving, is_unavailable = worker._new_drive, [0, 0], True

    def reluctant(claim: Claim, dependencies: WorkerDependencies, failure: RunFailure | None) -> Drive:
        drive = new_drive(claim, dependencies, failure)
        run = drive.run

        async def end_slowly(loaded: Loaded | None = None) -> DriveEnd:
            nonlocal is_unavailable
            driving[:] = driving[0] + 1, max(driving[1], driving[0] + 1)
            try:
                return await run(loaded)
            finally:
                is_unavailable = False
                await asyncio.sleep(6.0)
                driving[0] -= 1

        drive.run = end_slowly  # type: ignore[method-assign]
        return drive

    worker._new_drive = reluctant
    while_unavailable(world, "RenewLeases", lambda: is_unavailable)
    key = world.ledger.submit("hello")
    async with at_work(worker):
        await end_of(world, key)
    assert (driving[1], world.ledger.run(key).state) == (1, RunState.COMPLETED)


async def test_a_run_claimed_by_another_worker_is_dropped_at_renewal() -> None:
    world = World(VERDICTS, [long()])
    key = world.ledger.submit("hello")
    async with at_work(world.worker()):
        await asyncio.sleep(1)
        row = world.ledger.row(key)
        world.ledger.tables.runs[row.key] = replace(row, worker_id="other", epoch=2)
        await asyncio.sleep(4)
        assert (world.model.streaming, world.meter.left) == (0, ["lost"])


async def test_a_run_claimed_during_a_renewal_is_not_dropped() -> None:
    """The renewal was sent after the claim but executed before it, so its response lacks the run."""
    world = World(VERDICTS, [long(), long()])
    world.ledger.submit("hello")
    overlaps, renewed, claimed = False, asyncio.Event(), asyncio.Event()

    async def overlap(name: str, done: bool) -> None:
        if overlaps and name == "ClaimRuns" and not done:
            await renewed.wait()
        elif overlaps and name == "ClaimRuns":
            claimed.set()
        elif overlaps and name == "RenewLeases" and done:
            renewed.set()
            await claimed.wait()
            await asyncio.sleep(0.1)

    world.ledger.fault = overlap
    async with at_work(world.worker()):
        while not world.model.streaming:
            await asyncio.sleep(0.1)
        overlaps = True
        await end_of(world, world.ledger.submit("hello again"))
    assert (claimed.is_set(), "lost" in world.meter.left) == (True, False)


async def test_a_run_is_driven_even_if_the_response_to_its_claim_was_lost() -> None:
    world = World(VERDICTS, [])
    key = world.ledger.submit("hello")
    lost = iter([True])

    async def lose_the_answer(name: str, done: bool) -> None:
        if name == "ClaimRuns" and done and next(lost, False):
            raise DependencyUnavailable

    world.ledger.fault = lose_the_answer
    worker = world.worker()
    with suppress(DependencyUnavailable):
        await worker.claim_forever()
    async with at_work(worker):
        await end_of(world, key)
    assert world.ledger.row(key).epoch == 1


async def asked_of(world: World, worker: Worker, seconds: float) -> list[str]:
    """Return the requests that a worker sends within `seconds`."""
    asked = count(world)
    async with at_work(worker):
        await asyncio.sleep(seconds)
        return list(asked)


async def test_one_claim_serves_both_the_end_of_a_run_and_the_next_message() -> None:
    world = World(VERDICTS, [long(seconds=0.1) for _ in range(5)])
    worker = await listening(world)
    async with at_work(worker):
        await asyncio.sleep(0.1)
        asked = count(world, "ClaimRuns")
        for number in range(5):
            world.ledger.submit(f"hello {number}")
            worker.wake()
            while len(world.meter.left) <= number:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.005)
        assert len(asked) == 5
        await asyncio.sleep(0.05)
        assert len(asked) == 6, "the last end has no other claim"


async def test_beside_background_runs_a_message_is_claimed_without_delay_and_before_more_of_them() -> None:
    world = World(VERDICTS, [long() for _ in range(3)])

    def submit(*, in_background: bool) -> RunKey:
        key = world.ledger.submit("hello")
        world.ledger.tables.runs[key] = replace(world.ledger.row(key), in_background=in_background)
        return key

    submit(in_background=True)
    worker = await listening(world)
    async with at_work(worker):
        await asyncio.sleep(1)
        worker.wake()
        await asyncio.sleep(0.01)
        keys = [submit(in_background=True), submit(in_background=False)]
        async with worker.background_steps.foreground():
            worker.wake()
        await asyncio.sleep(0.005)
        assert [world.ledger.row(key).worker_id for key in keys] == [None, worker.worker_id]
        await asyncio.sleep(0.05)
        assert world.ledger.row(keys[0]).worker_id == worker.worker_id
    kinds = {step.run_id: step.in_background for step in world.ledger.steps}
    assert [kinds[key.run_id] for key in keys] == [True, False], "its commits are marked"


async def test_an_idle_worker_polls_rarely_as_long_as_it_would_be_notified_of_work() -> None:
    world = World(VERDICTS, [])
    assert len(await asked_of(world, world.worker(), 60.0)) >= 50, "without NATS, it polls every second"
    asked = await asked_of(world, await listening(world), 60.0)
    assert set(asked) == {"ClaimRuns"}, "it has no leases to renew"
    assert len(asked) <= 16


async def test_an_idle_worker_polls_every_second_as_soon_as_nats_is_lost() -> None:
    world = World(VERDICTS, [says("Done.")])
    hints = Hints()
    async with at_work(await listening(world, hints)):
        await asyncio.sleep(6.5)
        hints.connected = False
        submitted_at = world.clock.now()
        await end_of(world, world.ledger.submit("hello"))
    assert world.clock.now() - submitted_at < 2.5


@pytest.mark.parametrize("lease_seconds", [6.5, 8.0, 12.5])
async def test_an_idle_worker_takes_over_a_run_as_soon_as_its_lease_ends(lease_seconds: float) -> None:
    world = World(VERDICTS, [says("Done.")])
    key = world.ledger.submit("hello")
    await world.ledger.claim(WorkerId("dead"), runs_max=1, lease_seconds=lease_seconds)
    lease_end = present(world.ledger.row(key).claim_at).timestamp()
    async with at_work(await listening(world)):
        await end_of(world, key)
    assert world.clock.now() < lease_end + 0.5


async def test_after_a_handover_another_worker_continues_immediately() -> None:
    """OPS-5: it does not wait for the lease to expire."""

    world = World(VERDICTS, [long(), says("Done.")])
    key = world.ledger.submit("hello")
    async with at_work(world.worker("first")):
        await asyncio.sleep(1)
        started_at = world.clock.now()
    assert (world.clock.now() - started_at < 0.1, world.model.streaming) == (True, 0)
    async with at_work(world.worker("second")):
        await end_of(world, key)
    assert (world.clock.now() - started_at < 2, world.ledger.run(key).output_text) == (True, "Done.")


async def test_a_crashed_drive_fails_only_its_own_run() -> None:
    """I20: the failure does not name the exception."""

    world = World(VERDICTS, [calls("write")])
    keys = [world.ledger.submit("hello"), world.ledger.submit("hello")]

    def new_drive(claim: Claim) -> Drive:
        return (Undrivable if claim.key == keys[0] else Drive)(claim, world.dependencies)

    async with at_work(world.worker(new_drive=new_drive)):
        for key in keys:
            await end_of(world, key)

    failed = world.ledger.run(keys[0])
    assert (failed.state, present(failed.failure).reason) == (RunState.FAILED, "INTERNAL")
    assert "ZeroDivisionError" not in present(failed.failure).message
    assert world.ledger.run(keys[1]).state is RunState.COMPLETED


async def test_a_run_that_can_be_neither_driven_nor_ended_is_quarantined() -> None:
    """I20: an unreadable state is released three times and then quarantined, and the ledger reports it."""

    world = World(VERDICTS, [])
    keys = [world.ledger.submit("hello"), world.ledger.submit("hello")]
    world.ledger.tables.loop_states[keys[0]] = b'{"cursor":{"program":"unknown"}}'

    async with at_work(world.worker()):
        await end_of(world, keys[1])
        while not world.ledger.row(keys[0]).is_quarantined:
            await asyncio.sleep(0.1)
        left = list(world.meter.left)
        await asyncio.sleep(60)
        assert world.meter.left == left
    assert left.count("given_up") == 3
    assert (world.ledger.row(keys[0]).crashes, world.ledger.run(keys[1]).state) == (3, RunState.COMPLETED)


@pytest.mark.parametrize("error", [DependencyUnavailable, ZeroDivisionError, LeaseLost])
async def test_a_run_that_cannot_be_released_is_retried_at_renewal(error: type[Exception]) -> None:
    """This holds for any ledger error. Otherwise an undriven run could keep its lease forever."""
    world = World(VERDICTS, [])
    key = world.ledger.submit("hello")
    tries, errors = iter([Undrivable, Undrivable]), iter([error])

    def drive(claim: Claim) -> Drive:
        return next(tries, Drive)(claim, world.dependencies)

    async def fail(name: str, done: bool) -> None:
        for raised in errors if name == "ReportCrash" else ():
            raise raised

    world.ledger.fault = fail
    async with at_work(world.worker(new_drive=drive, ending_drive=drive)):
        await end_of(world, key)
    assert world.meter.left == ["lost" if error is LeaseLost else "crashed", "ended"]
