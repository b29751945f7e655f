"""Tasks end although a library loses their cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import pytest

from pawl.chassis import tasks


async def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_AGAIN_SECONDS", 0.01)
    losses = 3

    async def stubborn() -> None:
        nonlocal losses
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if not losses:
                    raise
                losses -= 1

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert task.cancelled()
    assert losses == 0


async def test_a_loop_notices_a_cancellation_that_got_lost() -> None:
    rounds = 0

    async def loop() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            tasks.check_cancelled()

    task = asyncio.create_task(loop())
    await asyncio.sleep(0)
    await tasks.end([task])
    assert task.cancelled()
    assert rounds == 1


@pytest.fixture
async def unseen() -> list[Any]:
    """What the event loop complains of: exceptions that nobody has taken."""
    found: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    return found


async def test_what_tasks_raise_is_dropped_although_who_waited_for_their_end_has_left(unseen: list[Any]) -> None:
    ending, goes_on = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ending.set()
            await goes_on.wait()
            raise ValueError("too late")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    caller = asyncio.create_task(tasks.end([task]))
    await ending.wait()
    await tasks.end([caller])
    goes_on.set()
    await asyncio.wait({task})
    await asyncio.sleep(0)
    del task, caller
    gc.collect()
    assert not unseen


async def test_what_is_shielded_goes_on_without_its_caller_and_fails_for_nobody(unseen: list[Any]) -> None:
    goes_on, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await goes_on.wait()
        ended.set()
        raise ValueError("too late")

    caller = asyncio.create_task(tasks.shield(work()))
    await asyncio.sleep(0)
    await tasks.end([caller])
    gc.collect()
    goes_on.set()
    await ended.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert not unseen


async def test_what_is_shielded_gives_and_raises_what_it_does_and_keeps_nothing_of_it() -> None:
    class Refused(Exception):
        pass

    async def give(number: int) -> int:
        if not number:
            raise Refused
        return 60 // number

    assert await tasks.shield(give(2)) == 30
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(Refused) as raised:
            await tasks.shield(give(0))
        error = weakref.ref(raised.value)
        del raised
        await asyncio.sleep(0)
        assert error() is None, "something in a circle keeps it"
    finally:
        gc.enable()
