"""Runs async tools on their own event loop.

A tool that blocks the loop delays other async tools, but not the registry.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from pawl.chassis.process import logs, tasks

# A tool counts as blocking the event loop if the loop does not respond for this long.
BLOCKED_SECONDS: Final = 2.0

_log = logs.get_logger(__name__)


class LoopCall:
    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        # A sentence that names the tool that blocked the loop during the call; empty if no tool did.
        self.hindrance = ""
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[Any] | None = None
        self._loop = loop

    async def result(self) -> Any:
        """Return the function's value, or raise its exception.

        If the caller is cancelled, this cancels the function and waits until the function ends. A second cancellation,
        at process exit, does not wait.
        """
        try:
            await asyncio.wait({self.ended})
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(self._cancel)
            await asyncio.wait({self.ended})
        return self.ended.result()

    def end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.ended.cancel()
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
            self.ended.exception()  # Retrieved, so that asyncio logs no unretrieved exception.
        else:
            self.ended.set_result(task.result())

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class ToolLoop:
    """An event loop for async functions, in a separate thread that starts with the first call.

    A watchdog logs the tool that blocks the loop, and sets `hindrance` on each delayed call.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._calls: set[LoopCall] = set()
        self._watching: set[asyncio.Task[None]] = set()
        self._hindrance = ""

    def start(self, name: str, function: Callable[[], Awaitable[Any]]) -> LoopCall:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._serve, args=(self._loop,), name="async tools", daemon=True).start()
        call = LoopCall(name, self._loop)
        call.hindrance = self._hindrance
        self._calls.add(call)
        call.ended.add_done_callback(lambda _: self._calls.discard(call))
        here = asyncio.get_running_loop()
        context = contextvars.copy_context()
        self._loop.call_soon_threadsafe(_start, call, function, here, context=context)
        if not self._watching:
            tasks.start(self._watching, self._watch(self._loop), name="tool watchdog")
        return call

    def close(self) -> None:
        """Cancel the running calls and end the thread. Do not wait for a function that blocks the loop."""
        for task in self._watching:
            task.cancel()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._stopped.wait())

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        here = asyncio.get_running_loop()
        while self._calls:
            answered = asyncio.Event()
            loop.call_soon_threadsafe(here.call_soon_threadsafe, answered.set)
            waiting = asyncio.ensure_future(answered.wait())
            await asyncio.wait({waiting}, timeout=BLOCKED_SECONDS)
            if not answered.is_set():
                self._blocked(asyncio.current_task(loop))
            await waiting
            self._hindrance = ""
            await asyncio.sleep(BLOCKED_SECONDS / 4)

    def _blocked(self, blocking: asyncio.Task[Any] | None) -> None:
        names = {call.name for call in self._calls if call.task is blocking} or {call.name for call in self._calls}
        tools = " or ".join(sorted(names))
        _log.warning("tool.blocks", tool=tools, seconds=BLOCKED_SECONDS)
        self._hindrance = f"{tools} blocks the event loop of async tools: use `def` instead of `async def`, or await"
        for call in self._calls:
            call.hindrance = self._hindrance


def _start(call: LoopCall, function: Callable[[], Awaitable[Any]], caller: asyncio.AbstractEventLoop) -> None:
    """Start a call on the tools' event loop, which must be the running loop."""

    def end(task: asyncio.Task[Any]) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            caller.call_soon_threadsafe(call.end, task)

    async def run() -> Any:
        return await function()

    call.task = asyncio.get_running_loop().create_task(run(), name=f"tool {call.name}")
    call.task.add_done_callback(end)
