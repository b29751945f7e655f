"""Processes on one virtual event loop. Each can be frozen, resumed and killed at any await.

Each callback runs in a context that names its process. The callbacks of a stopped process are queued, so a frozen
process does nothing and a killed process runs no `finally`. At the end of a simulation the killed processes are resumed
once, only to be cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from tests.fakes.manual_clock import VirtualLoop

T = TypeVar("T")

_RESOLUTION_SECONDS = 1e-6

_process: ContextVar[Process | None] = ContextVar("process", default=None)


class Process:
    """A process that can be frozen and killed as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.frozen = False
        self.on_kill: dict[Callable[[], None], None] = {}
        self._kept: list[asyncio.Handle] = []
        self._context = copy_context()
        self._context.run(_process.set, self)

    @property
    def stopped(self) -> bool:
        """True if callbacks of the process are queued instead of run."""
        return self.frozen or not self.alive

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        context = self._context.copy()
        return asyncio.get_running_loop().create_task(work, name=name or self.name, context=context)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        if self.alive:
            self._run_kept()

    def kill(self) -> None:
        """Stop the process permanently, and notify clients that wait for its responses."""
        self.alive = False
        waiting, self.on_kill = list(self.on_kill), {}
        for tell in waiting:
            tell()

    def finish(self) -> None:
        """Resume the process at the end of the simulation, so that its tasks can be cancelled."""
        self.alive, self.frozen = True, False
        self._run_kept()

    def keep(self, handle: asyncio.Handle) -> None:
        self._kept.append(handle)

    def _run_kept(self) -> None:
        kept, self._kept = self._kept, []
        loop: Any = asyncio.get_running_loop()
        loop._ready.extend(kept)


class _Task(asyncio.Task[T]):
    """A task that is hashed by a number instead of its address, because task groups cancel tasks in set order."""

    def __init__(self, number: int, work: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(VirtualLoop):
    """A virtual loop that tracks the process of each callback and does no I/O."""

    def __init__(self) -> None:
        super().__init__()
        self._jumping.select = self._jump  # type: ignore[method-assign]
        numbers = itertools.count()
        self.set_task_factory(lambda loop, work, **options: _Task(next(numbers), work, loop=loop, **options))

    def _jump(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("deadlock: no task can run and no timer is set")
        self._jumping.now += max(timeout, _RESOLUTION_SECONDS)
        return []

    def call_soon(  # type: ignore[override]  # any callback
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        process = _process.get() if context is None else context.get(_process)
        if process is None or not process.stopped:
            return super().call_soon(callback, *args, context=context)
        handle = events.Handle(callback, args, self, context)
        process.keep(handle)
        return handle

    def call_at(  # type: ignore[override]  # any callback
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _process.get() if context is None else context.get(_process)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        timers: list[asyncio.TimerHandle] = []
        fire = _Fire(self, process, callback, args, timers)
        timers.append(super().call_at(when, fire, context=context))
        return timers[0]


class _Fire:
    __slots__ = ("_args", "_callback", "_loop", "_process", "_timers")

    def __init__(
        self,
        loop: SimulatedLoop,
        process: Process,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        timers: list[asyncio.TimerHandle],
    ) -> None:
        self._loop = loop
        self._process = process
        self._callback = callback
        self._args = args
        self._timers = timers

    def __call__(self) -> None:
        if self._process.stopped:
            self._process.keep(events.Handle(self, (), self._loop, copy_context()))
        elif not self._timers[0].cancelled():
            self._callback(*self._args)


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
