"""Threads of tools: reused, and never in each other's way."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.tool_registry.adapters.python.runner import PythonRunner, Threads
from tests.poll import PATIENCE_SECONDS, until


async def test_a_thread_that_cannot_be_started_takes_nobody_s_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tool: Any = SimpleNamespace(bind=lambda *_: lambda: 1, is_async=False, marks_begun=True)
    context: Any = None
    async with PythonRunner(threads_max=1) as runner:

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                await runner.start(tool, {}, context).result()
            with pytest.raises(RuntimeError, match="new thread"):
                await runner.answer("tool", lambda: 1)
        assert runner.threads_busy == 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await runner.start(tool, {}, context).result() == await runner.answer("tool", lambda: 1) == 1


async def test_a_timeout_error_of_a_preview_is_not_that_it_takes_too_long() -> None:
    def preview() -> None:
        raise TimeoutError("of its own")

    async with PythonRunner(threads_max=1) as runner:
        with pytest.raises(TimeoutError, match="of its own"):
            await runner.answer("tool", preview)


async def test_a_function_that_raises_stop_iteration_fails_and_leaves_its_place() -> None:
    tool: Any = SimpleNamespace(bind=lambda *_: lambda: next(iter(())), is_async=False, marks_begun=True)
    context: Any = None
    async with PythonRunner(threads_max=1) as runner:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(RuntimeError, match="StopIteration"):
                    await runner.start(tool, {}, context).result()
        assert runner.threads_busy == 0


async def test_a_thread_is_kept_for_the_next_job_and_ends_when_they_are_closed() -> None:
    threads, did, ended = Threads(), list[threading.Thread](), asyncio.Event()
    loop, release = asyncio.get_running_loop(), threading.Event()

    def job(wait: bool = False) -> None:
        did.append(threading.current_thread())
        if wait:
            release.wait(PATIENCE_SECONDS)
        loop.call_soon_threadsafe(ended.set)

    async def do() -> threading.Thread:
        ended.clear()
        threads.begin(job)
        await ended.wait()
        threads.ended()
        return did[-1]

    idle = await do()
    assert await do() is idle
    threads.begin(lambda: job(wait=True))
    await until(lambda: asyncio.sleep(0, len(did) == 3))
    busy = did[-1]
    assert await do() != busy, "a busy thread keeps no job waiting"
    threads.close()
    release.set()
    threads.ended()
    for thread in {idle, *did}:
        await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
        assert not thread.is_alive()
