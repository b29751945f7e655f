from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.tool_registry.adapters.python.runner import PythonRunner, Threads
from tests.poll import PATIENCE_SECONDS, until


class Watched:
    """The threads, and who did which job."""

    def __init__(self) -> None:
        self.threads = Threads()
        self.seen: list[threading.Thread] = []

    async def do(self, job: Callable[[], object] = lambda: None) -> threading.Thread:
        """Have a job done, and return the thread that did it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        did: list[threading.Thread] = []

        def run() -> None:
            did.append(threading.current_thread())
            self.seen.append(did[0])
            with suppress(Exception):
                job()
            loop.call_soon_threadsafe(ended.set)

        self.threads.begin(run)
        await ended.wait()
        self.threads.ended()
        return did[0]

    async def all_gone(self) -> bool:
        return not any(thread.is_alive() for thread in self.seen)


class Stuck:
    """A job that goes on until it is released."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._release = threading.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self) -> None:
        self._loop.call_soon_threadsafe(self.begun.set)
        self._release.wait(PATIENCE_SECONDS)

    async def released(self, doing: asyncio.Future[threading.Thread]) -> threading.Thread:
        """Let it end, and return the thread that did it."""
        self._release.set()
        return await doing


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    watched = Watched()
    yield watched
    watched.threads.close()
    await until(watched.all_gone)


async def test_a_thread_is_kept_for_the_next_job(watched: Watched) -> None:
    assert len({await watched.do() for _ in range(5)}) == 1


async def test_a_busy_thread_keeps_nobody_waiting(watched: Watched) -> None:
    stuck = Stuck()
    doing = asyncio.ensure_future(watched.do(stuck))
    await stuck.begun.wait()
    others = {await watched.do() for _ in range(5)}
    busy = await stuck.released(doing)
    assert len(others) == 1
    assert busy not in others
    assert {await watched.do() for _ in range(5)} <= {busy, *others}


async def test_threads_end_when_they_are_closed_and_busy_ones_after_their_job(watched: Watched) -> None:
    stuck = Stuck()
    doing = asyncio.ensure_future(watched.do(stuck))
    await stuck.begun.wait()
    idle = await watched.do()
    watched.threads.close()
    await asyncio.to_thread(idle.join, PATIENCE_SECONDS)
    assert not idle.is_alive()
    busy = await stuck.released(doing)
    await asyncio.to_thread(busy.join, PATIENCE_SECONDS)
    assert not busy.is_alive()


async def test_an_idle_thread_keeps_nothing_of_its_last_job(watched: Watched) -> None:
    class Large:
        def use(self) -> None:
            """Do nothing."""

    large: Any = Large()
    gone = weakref.ref(large)
    await watched.do(large.use)
    del large

    async def is_gone() -> bool:
        gc.collect()
        return gone() is None

    await until(is_gone)


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
        assert runner.threads_busy == 0
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await runner.start(tool, {}, context).result() == 1


async def test_a_function_that_raises_stop_iteration_fails_and_leaves_its_place() -> None:
    tool: Any = SimpleNamespace(bind=lambda *_: lambda: next(iter(())), is_async=False, marks_begun=True)
    context: Any = None
    async with PythonRunner(threads_max=1) as runner:
        for _ in range(2):
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(RuntimeError, match="StopIteration"):
                    await runner.start(tool, {}, context).result()
        assert runner.threads_busy == 0
