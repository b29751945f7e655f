"""Tasks end although a library loses their cancellation."""

from __future__ import annotations

import asyncio
import contextlib

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


async def test_what_ended_tasks_raise_is_dropped() -> None:
    async def fail() -> None:
        raise ValueError("unseen")

    task = asyncio.create_task(fail())
    await asyncio.sleep(0)
    await tasks.end([task])
    tasks.check_cancelled()
