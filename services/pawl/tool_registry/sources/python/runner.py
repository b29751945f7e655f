"""Runs the functions of Python tools: async ones on an event loop, sync ones in threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from pawl.chassis.process import logs
from pawl.chassis.process.tasks import delivered, shield
from pawl.tool_registry.sdk.context import ToolContext
from pawl.tool_registry.sdk.tool import Tool
from pawl.tool_registry.sources.python import tool_loop
from pawl.tool_registry.sources.python.tool_loop import ToolLoop

T = TypeVar("T")

_log = logs.get_logger(__name__)


class TakesTooLong(Exception):
    """The preview or bulk count of a tool did not end in time."""


class ToolCrashed(Exception):
    """A tool raised what is no Exception: it tried to end the process, or cancelled itself."""


class Threads:
    """Threads that are kept from one job to the next, as many as were ever busy at once; to be used by one loop.

    They do not keep the process alive. Those that are busy at `close` end after their jobs.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._is_closed = False

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Have a thread call a function; cancelling the future changes nothing but that."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        variables = contextvars.copy_context()

        def deliver(value: Any, error: BaseException | None) -> None:
            if error is not None:
                ended.set_exception(error)
                ended.exception()  # Mark it as retrieved, even if no caller awaits it.
            else:
                ended.set_result(value)

        def run() -> None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = delivered(lambda: variables.run(function))
            except Exception as raised:  # noqa: BLE001  # the author's code
                error = raised
            except BaseException as raised:  # noqa: BLE001  # sys.exit in a tool must not end a thread silently
                error = ToolCrashed(type(raised).__name__)
            with suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(deliver, value, error)

        if self._idle:
            self._idle -= 1
        else:
            # Starting one costs as much as all else that a small function costs.
            threading.Thread(target=_do, args=(self._jobs,), name="tool", daemon=True).start()
        self._jobs.put(run)
        ended.add_done_callback(self._release)
        return ended

    def _release(self, _: object) -> None:
        if self._is_closed:
            self._jobs.put(None)
        else:
            self._idle += 1

    def close(self) -> None:
        """Have the threads end; idempotent."""
        self._is_closed = True
        for _ in range(self._idle):
            self._jobs.put(None)
        self._idle = 0


def _do(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # What it refers to is not kept until the next one comes.


class PythonRunner:
    """Runs async tools as tasks and sync ones in at most `threads_max` threads; an async context manager.

    A thread cannot be stopped from outside. One whose result is not wanted any
    more counts as occupied until its function returns; its context says that it
    is cancelled. Threads do not keep the process alive. Async tools of the
    deployment share an event loop apart from the registry's: one that blocks
    delays the others.
    """

    def __init__(self, *, threads_max: int) -> None:
        self._free = asyncio.Semaphore(threads_max)
        self._free_to_answer = asyncio.Semaphore(threads_max)
        self._threads = Threads()
        self._tools = ToolLoop()
        self.threads_busy = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._threads.close()
        self._tools.close()

    def start(self, tool: Tool[..., Any], arguments: Mapping[str, Any], context: ToolContext) -> PythonWork:
        call = tool.bind(arguments, context)
        begin: Callable[[], None] = (lambda: None) if tool.marks_start else context.mark_started
        if not tool.is_async:
            return PythonWork(self._in_thread(call, begin))
        if not tool.on_tool_loop:
            return PythonWork(self._in_task(call, begin))
        begin()
        apart = self._tools.begin(tool.name, lambda: _guarded(call()))
        return PythonWork(apart.result(), hindrance=lambda: apart.hindrance)

    async def answer(self, tool_name: str, function: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(tool_loop.BLOCKED_SECONDS) as limit:
                await self._free_to_answer.acquire()
                try:
                    ended = self._threads.start(function)
                except RuntimeError:  # The system starts no more threads now.
                    self._free_to_answer.release()
                    raise
                ended.add_done_callback(lambda _: self._free_to_answer.release())
                return await shield(ended)
        except TimeoutError as error:
            if not limit.expired():
                raise
            _log.warning("tool.blocks", tool=tool_name, seconds=tool_loop.BLOCKED_SECONDS)
            raise TakesTooLong(tool_name) from error

    async def _in_task(self, call: Callable[[], Any], begin: Callable[[], None]) -> Any:
        begin()
        return await call()

    async def _in_thread(self, call: Callable[[], Any], begin: Callable[[], None]) -> Any:
        await self._free.acquire()
        begin()
        try:
            ended = self._threads.start(call)
        except RuntimeError:  # The system starts no more threads now.
            self._free.release()
            raise

        def free(_: object) -> None:
            self.threads_busy -= 1
            self._free.release()

        ended.add_done_callback(free)
        self.threads_busy += 1
        with suppress(asyncio.CancelledError):
            # The second cancel is that of a process that ends.
            await asyncio.wait({ended})
            return ended.result()
        await asyncio.wait({ended})
        return ended.result()


async def uncancelled(ended: asyncio.Future[T]) -> T:
    """Wait for what cannot be stopped: cancelling takes effect only when it has ended."""
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            await asyncio.wait({ended})
            raise
    return ended.result()


class PythonWork:
    """A tool that runs. `task` ends when the tool has ended; cancelled, if that is how the tool ended."""

    def __init__(self, coroutine: Any, *, hindrance: Callable[[], str] = lambda: "") -> None:
        self._hindrance = hindrance
        self.task: asyncio.Task[Any] = asyncio.create_task(_guarded(coroutine))
        # Marked as retrieved, even if no caller awaits it any more.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def hindrance(self) -> str:
        """The tool that held this one up by blocking the event loop of async tools, as a sentence; empty for none."""
        return self._hindrance()

    async def result(self) -> Any:
        """Return what the tool returned, or raise what it raised.

        Cancelling this cancels an async tool; a sync one goes on in its thread.
        """
        try:
            await asyncio.wait({self.task})
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        if self.task.cancelled():
            raise ToolCrashed("CancelledError")
        return self.task.result()


async def _guarded(coroutine: Any) -> Any:
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        # Raised out of a task, these would end the process.
        raise ToolCrashed(type(error).__name__) from None
