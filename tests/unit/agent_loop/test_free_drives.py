"""A worker that offers a free drive with a message: runs that start without a claim, lost responses, shutdown."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.loop.worker import Worker, WorkerLimits
from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import DependencyUnavailable
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import RunState
from tests.fakes.ledger import STORE, USER
from tests.fakes.loop_world import World
from tests.fakes.model import says
from tests.unit.agent_loop.scenario import at_work, end_of


def message(request_id: str = "", **fields: Any) -> pb.SubmitMessageRequest:
    return pb.SubmitMessageRequest(
        store_id=STORE,
        user_id=USER,
        text="hello",
        policy=pb.MESSAGE_POLICY_QUEUE,
        request_id=request_id,
        **fields,
    )


async def start(world: World, worker: Worker, request_id: str = "") -> RunKey:
    ledger = PublicLedger(world.ledger.channel, worker)
    return RunKey(StoreId(STORE), RunId((await ledger.submit_message(message(request_id))).run.run_id))


def counting(world: World) -> Counter[str]:
    counts = Counter[str]()

    async def count(name: str, done: bool) -> None:
        counts[name] += done

    world.ledger.fault = count
    return counts


async def test_accepted_run_is_driven_without_claiming_or_loading_it() -> None:
    world = World({}, [says("Done.")])
    worker = world.worker()
    async with at_work(worker):
        await asyncio.sleep(0.1)
        counts = counting(world)
        key = await start(world, worker)
        await end_of(world, key)
        # The next claim is for runs that waited for this one.
        assert counts["LoadRun"] == 0
        assert counts["ClaimRuns"] <= 1
    assert world.ledger.row(key).epoch == 1
    assert world.ledger.run(key).output_text == "Done."


async def test_run_whose_response_was_lost_is_driven_after_the_next_renewal() -> None:
    """Once, although the client repeats its request."""
    world = World({}, [says("Done.")])
    worker = world.worker()
    lost = iter([True])

    async def lose_the_response(name: str, done: bool) -> None:
        if name == "SubmitMessage" and done and next(lost, False):
            raise DependencyUnavailable

    world.ledger.fault = lose_the_response
    async with at_work(worker):
        with suppress(DependencyUnavailable):
            await start(world, worker, "r1")
        key = await start(world, worker, "r1")
        started = world.clock.now()
        await end_of(world, key)
    assert world.clock.now() - started < WorkerLimits().renew_seconds + 1
    assert world.ledger.row(key).epoch == 1
    assert len(world.model.requests) == 1
    assert world.meter.left == ["ended"]


async def test_run_of_a_worker_that_died_is_taken_over_when_its_lease_ends() -> None:
    world = World({}, [says("Done.")])
    dead = world.worker("dead")
    with dead.free_drive() as drive:
        assert drive is not None
        request = message()
        request.drive.worker_id, request.drive.lease_seconds = drive.worker_id, drive.lease_seconds
        run = (await PublicLedger(world.ledger.channel).submit_message(request)).claimed
    key = RunKey(StoreId(STORE), RunId(run.run_id))
    async with at_work(world.worker("alive")):
        await end_of(world, key)
    assert (world.ledger.row(key).epoch, world.ledger.row(key).crashes) == (2, 0)
    assert len(world.model.requests) == 1


async def test_stopping_worker_releases_a_run_that_it_still_gets() -> None:
    """OPS-5: another worker drives it without waiting for the lease to end."""
    world = World({}, [says("Done.")])
    worker = world.worker("first")
    sent = asyncio.Event()

    async def be_slow(name: str, done: bool) -> None:
        if name == "SubmitMessage" and not done:
            sent.set()
            await asyncio.sleep(0.3)

    world.ledger.fault = be_slow
    async with at_work(worker):
        starting = asyncio.create_task(start(world, worker))
        await sent.wait()
    key = await starting
    assert world.ledger.row(key).worker_id is None
    started = world.clock.now()
    async with at_work(world.worker("second")):
        await end_of(world, key)
    assert world.clock.now() - started < 2
    assert world.ledger.row(key).epoch == 2


async def test_stopping_worker_offers_no_drive() -> None:
    world = World({}, [])
    worker = world.worker()
    async with at_work(worker):
        pass
    with worker.free_drive() as drive:
        assert drive is None
    key = await start(world, worker)
    assert world.ledger.row(key).worker_id is None


async def test_worker_offers_half_of_its_drives() -> None:
    """The other half is for runs that it claims, so that other workers get their share of new ones."""
    worker = World({}, []).worker(limits=WorkerLimits(runs_max=4))
    with worker.free_drive() as first, worker.free_drive() as second, worker.free_drive() as third:
        assert first is not None
        assert second is not None
        assert third is None
    with worker.free_drive() as again:
        assert again is not None


async def test_overloaded_worker_offers_no_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({}, [[100.0, *says("Done.")]])
    worker = world.worker()
    async with at_work(worker):
        await start(world, worker)
        sleep = world.clock.sleep

        async def sleep_longer(seconds: float) -> None:
            await sleep(seconds + 0.2)

        monkeypatch.setattr(type(world.clock), "sleep", staticmethod(sleep_longer))
        await asyncio.sleep(3)
        with worker.free_drive() as drive:
            assert drive is None
        monkeypatch.undo()
        await asyncio.sleep(3)
        with worker.free_drive() as drive:
            assert drive is not None


async def test_run_accepted_during_a_renewal_keeps_its_drive() -> None:
    """The renewal does not confirm it, because the ledger had not accepted it yet."""
    world = World({}, [[5.0, *says("Done.")]])
    worker = world.worker()
    sent, renewed = asyncio.Event(), asyncio.Event()

    async def renew_in_between(name: str, done: bool) -> None:
        if name == "SubmitMessage" and not done:
            sent.set()
            await renewed.wait()
        if name == "RenewLeases" and done and sent.is_set() and not renewed.is_set():
            renewed.set()
            await asyncio.sleep(0.2)

    world.ledger.fault = renew_in_between
    async with at_work(worker):
        key = await start(world, worker)
        await end_of(world, key)
    assert world.meter.left == ["ended"]
    assert len(world.model.requests) == 1
    assert world.ledger.run(key).state is RunState.COMPLETED
