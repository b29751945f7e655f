"""Helper processes, which handle untrusted data and are killed if that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.tasks import shield, start, within
from pawl.errors import DependencyUnavailable, Overloaded
from pawl.tool_registry.catalog.ports import TooCostly
from pawl.tool_registry.sources.process.call import spawn
from pawl.tool_registry.sources.process.helper_child import OUT_OF_MEMORY

T = TypeVar("T")

PROCESSES_MAX: Final = 3
WAITING_MAX: Final = 200
# Limit per store. It applies separately to short and long jobs, and includes the running one.
WAITING_BYTES_MAX: Final = 64 * 1024 * 1024

_LENGTH_BYTES: Final = 4
_EXIT_SECONDS: Final = 5.0
# The CPU limit ends costly jobs. The wall-clock limit ends processes that get no CPU time.
_WALL_FACTOR: Final = 20
_WALL_SECONDS: Final = 30.0
# Exit statuses that a job causes. Others may come from the machine, for example from its out-of-memory killer.
_LIMITS: Final = (-signal.SIGPROF, OUT_OF_MEMORY)
# Jobs that take up to this much CPU time, such as checking a call, are short. A page or a document may take longer.
_SHORT_CPU_SECONDS: Final = 1.0
_SLOW_CPU_SECONDS: Final = 0.1
_SLOW_FOR_SECONDS: Final = 60.0

_log = logs.get_logger(__name__)


@dataclass(slots=True)
class _Turn:
    """The queue for a store's short jobs, or for its long jobs. Only one job of a queue runs at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0
    waiting_bytes: int = 0


class Helpers:
    """Implements the Helper port with processes that run the registry's own code. Each process runs one job at a time.

    A store can run one short and one long job at a time. Long jobs, and short jobs of stores that recently had slow
    ones, always leave one process free. A store therefore never waits for another store's data, and a call never waits
    for a web page. A job whose caller has left still runs until it ends or reaches its CPU limit.
    """

    def __init__(self, *, processes_max: int = PROCESSES_MAX) -> None:
        self._free = asyncio.Semaphore(processes_max)
        self._slow_free = asyncio.Semaphore(max(processes_max - 1, 1))
        self._turns: dict[tuple[StoreId, bool], _Turn] = {}
        self._slow_until: dict[StoreId, float] = {}
        self._idle: list[_Process] = []
        self._jobs: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        while self._idle:
            await self._idle.pop().end()

    async def run(self, store_id: StoreId, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        is_long = cpu_seconds > _SHORT_CPU_SECONDS
        turn = self._turns.get((store_id, is_long), _Turn())
        request = pickle.dumps((function, arguments, cpu_seconds))
        if turn.waiting >= WAITING_MAX or turn.waiting_bytes + len(request) > WAITING_BYTES_MAX:
            raise Overloaded("too many checks for this store are waiting: try again later")
        self._turns[store_id, is_long] = turn
        turn.waiting += 1
        turn.waiting_bytes += len(request)
        seconds = _WALL_SECONDS + _WALL_FACTOR * cpu_seconds
        job = start(self._jobs, self._in_turn(store_id, turn, request, seconds, is_long=is_long), name="helper")
        is_value, value = await shield(job)
        if not is_value:
            raise value
        result: T = value
        return result

    def _note_slow(self, store_id: StoreId, *, is_long: bool) -> None:
        if is_long:
            return  # Long jobs leave a process free anyway, and do not mean that calls are slow.
        now = asyncio.get_running_loop().time()
        self._slow_until = {store: until for store, until in self._slow_until.items() if until > now}
        self._slow_until[store_id] = now + _SLOW_FOR_SECONDS

    async def _in_turn(
        self, store_id: StoreId, turn: _Turn, request: bytes, seconds: float, *, is_long: bool
    ) -> tuple[bool, Any]:
        try:
            async with turn.lock, contextlib.AsyncExitStack() as slots:
                if is_long or self._slow_until.get(store_id, 0.0) > asyncio.get_running_loop().time():
                    await slots.enter_async_context(self._slow_free)
                await slots.enter_async_context(self._free)
                return await self._ask(store_id, request, seconds, is_long=is_long)
        finally:
            turn.waiting -= 1
            turn.waiting_bytes -= len(request)
            if not turn.waiting:
                self._turns.pop((store_id, is_long), None)

    async def _ask(self, store_id: StoreId, request: bytes, seconds: float, *, is_long: bool) -> tuple[bool, Any]:
        while True:
            is_new = not self._idle
            process = await _Process.start() if is_new else self._idle.pop()
            try:
                answer = await process.ask(request, seconds)
            except TimeoutError:
                # The CPU limit would have ended a costly job, so the machine gave this one no CPU time.
                await process.end()
                self._note_slow(store_id, is_long=is_long)
                raise DependencyUnavailable("the machine is too busy to check this: try again later") from None
            except BaseException:
                await shield(process.end())
                raise
            if answer is not None:
                break
            status = await process.end()
            _log.warning("helper.ended", store=store_id, status=status)
            if is_new and status > 0 and status not in _LIMITS:
                raise DependencyUnavailable("cannot start a process to check this: try again later")
            if is_new or status in _LIMITS:
                self._note_slow(store_id, is_long=is_long)
                raise TooCostly
        self._idle.append(process)
        # Written by our own code in a process that we started.
        used, is_value, value = pickle.loads(answer)  # noqa: S301
        if used > _SLOW_CPU_SECONDS:
            self._note_slow(store_id, is_long=is_long)
        return is_value, value


class _Process:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Self:
        """Start a helper process.

        Raises:
            DependencyUnavailable: This machine cannot start another process.
        """
        try:
            process = await spawn("helper_child", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        except OSError as error:
            _log.error("helper.not_started", error=error.strerror)
            raise DependencyUnavailable("cannot start a process to check this: try again later") from None
        return cls(process)

    async def ask(self, request: bytes, seconds: float) -> bytes | None:
        """Return the helper's answer, or None if the process has ended.

        Raises:
            TimeoutError: The answer did not arrive in time.
        """
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None  # noqa: S101  # it was started with pipes
        assert reader is not None  # noqa: S101
        try:
            async with asyncio.timeout(seconds):
                writer.write(len(request).to_bytes(_LENGTH_BYTES, "big"))
                writer.write(request)
                await writer.drain()
                length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
                return await reader.readexactly(length)
        except TimeoutError:
            raise
        except (asyncio.IncompleteReadError, OSError):
            # Killing a process that has just ended would lose its exit status.
            await within(_EXIT_SECONDS, self._process.wait())
            return None

    async def end(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return await self._process.wait()
