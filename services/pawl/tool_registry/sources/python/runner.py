"""Runs the functions of Python tools: async functions on an event loop, and sync functions in threads."""

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
from pawl.tool_registry.sources.python import tool_loop
from pawl.tool_registry.sources.python.tool_loop import ToolLoop
from pawl.tools.sdk.context import ToolContext
from pawl.tools.sdk.tool import Tool

T = TypeVar("T")

_log = logs.get_logger(__name__)


class TakesTooLong(Exception):
    """Raised when a tool's preview or bulk count does not finish in time."""


class ToolCrashed(Exception):
    """Raised when a tool does not raise an Exception, but tries to exit the process or to cancel itself."""


class Threads:
    """A thread pool for one event loop. It grows to the peak number of concurrent jobs.

    The threads are daemons. A thread that is busy when `close` is called finishes its job first.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = 0
        self._is_closed = False

    def start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a thread. The function does not stop if the future is cancelled."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()
        variables = contextvars.copy_context()

        def deliver(value: Any, error: BaseException | None) -> None:
            if error is not None:
                ended.set_exception(error)
                ended.exception()  # Mark the error as retrieved, even if no caller awaits it.
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
            # Reused, because starting a thread costs as much as running a small function.
            threading.Thread(target=_work, args=(self._jobs,), name="tool", daemon=True).start()
        self._jobs.put(run)
        ended.add_done_callback(self._release)
        return ended

    def _release(self, _: object) -> None:
        if self._is_closed:
            self._jobs.put(None)
        else:
            self._idle += 1

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._is_closed = True
        for _ in range(self._idle):
            self._jobs.put(None)
        self._idle = 0


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Release references before waiting for the next job.


class PythonRunner:
    """Runs async tools as tasks, and sync tools in at most `threads_max` threads. An async context manager.

    A thread cannot be stopped from outside. If its call is cancelled, the tool's context reports this, and the thread
    counts as busy until its function returns. The threads are daemons. The deployment's async tools share an event loop
    that is separate from the registry's. A tool that blocks this loop delays the other async tools.
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
        mark_started: Callable[[], None] = (lambda: None) if tool.marks_start else context.mark_started
        if not tool.is_async:
            return PythonWork(self._in_thread(call, mark_started))
        if not tool.on_tool_loop:
            return PythonWork(self._in_task(call, mark_started))
        mark_started()
        running = self._tools.start(tool.name, lambda: _guarded(call()))
        return PythonWork(running.result(), hindrance=lambda: running.hindrance)

    async def answer(self, tool_name: str, function: Callable[[], T]) -> T:
        try:
            async with asyncio.timeout(tool_loop.BLOCKED_SECONDS) as limit:
                await self._free_to_answer.acquire()
                try:
                    ended = self._threads.start(function)
                except RuntimeError:  # The system cannot start another thread.
                    self._free_to_answer.release()
                    raise
                ended.add_done_callback(lambda _: self._free_to_answer.release())
                return await shield(ended)
        except TimeoutError as error:
            if not limit.expired():
                raise
            _log.warning("tool.blocks", tool=tool_name, seconds=tool_loop.BLOCKED_SECONDS)
            raise TakesTooLong(tool_name) from error

    async def _in_task(self, call: Callable[[], Any], mark_started: Callable[[], None]) -> Any:
        mark_started()
        return await call()

    async def _in_thread(self, call: Callable[[], Any], mark_started: Callable[[], None]) -> Any:
        await self._free.acquire()
        mark_started()
        try:
            ended = self._threads.start(call)
        except RuntimeError:  # The system cannot start another thread.
            self._free.release()
            raise

        def free(_: object) -> None:
            self.threads_busy -= 1
            self._free.release()

        ended.add_done_callback(free)
        self.threads_busy += 1
        with suppress(asyncio.CancelledError):
            # A second cancellation means that the process is ending.
            await asyncio.wait({ended})
            return ended.result()
        await asyncio.wait({ended})
        return ended.result()


class PythonWork:
    """A running tool. `task` ends when the tool does. If the tool ended with CancelledError, the task is cancelled."""

    def __init__(self, coroutine: Any, *, hindrance: Callable[[], str] = lambda: "") -> None:
        self._hindrance = hindrance
        self.task: asyncio.Task[Any] = asyncio.create_task(_guarded(coroutine))
        # Mark the error as retrieved, even if no caller awaits it.
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def hindrance(self) -> str:
        """A sentence that names the tool that delayed this tool by blocking the event loop, or an empty string."""
        return self._hindrance()

    async def result(self) -> Any:
        """Return the tool's value, or raise its error.

        If this is cancelled, an async tool is cancelled, but a sync tool continues in its thread.
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
        # These would end the process if raised from a task.
        raise ToolCrashed(type(error).__name__) from None
