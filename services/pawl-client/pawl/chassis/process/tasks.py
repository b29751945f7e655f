"""Holds references to tasks until they end, and cancels tasks reliably.

A cancellation can get lost: before Python 3.12, `asyncio.wait_for`, which nats-py uses, drops a cancellation that
arrives at the same time as the result. The cancelled task then keeps running, and the caller would wait forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Final, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")

_CANCEL_AGAIN_SECONDS: Final = 3.0

_shielded: Final[set[asyncio.Future[Any]]] = set()


def start(
    held: set[asyncio.Task[T]], work: Coroutine[Any, Any, T], *, name: str, context: Context | None = None
) -> asyncio.Task[T]:
    """Start a task and keep it in `held` until it is done. The event loop itself holds only weak references."""
    return hold(held, asyncio.get_running_loop().create_task(work, name=name, context=context))


def hold(held: set[F], work: F) -> F:
    """Keep a task or another future in `held` until it is done, and return it."""
    held.add(work)
    work.add_done_callback(held.discard)
    return work


async def within(seconds: float | None, work: Awaitable[T]) -> T | None:
    """Return the result of `work`. After `seconds` (None means never), cancel the work and return None.

    If `work` itself raises TimeoutError, this also returns None.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return None


async def shield(work: Awaitable[T]) -> T:
    """Await `work`, which continues if the caller is cancelled. If `work` then fails, its exception is dropped.

    With `asyncio.shield`, such an exception would be reported as never retrieved, and the process would exit with code
    1.
    """
    future = asyncio.ensure_future(work)
    if future not in _shielded:
        hold(_shielded, future).add_done_callback(_retrieve)
    try:
        await asyncio.wait({future})
        return future.result()
    finally:
        del work, future  # An exception keeps this frame, which must not keep the exception.


async def uncancelled(ended: asyncio.Future[T]) -> T:
    """Wait for work that cannot be stopped.

    If the caller is cancelled, raise CancelledError only after the work has ended.
    """
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            await asyncio.wait({ended})
            raise
    return ended.result()


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all of them have ended. Their exceptions are dropped.

    Tasks that ignore a cancellation are cancelled again. Exceptions are dropped even if the caller is cancelled.
    """
    every = list(tasks)
    for task in every:
        task.add_done_callback(_retrieve)
    pending = {task for task in every if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*every, return_exceptions=True)


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled but the cancellation was lost.

    Raises:
        asyncio.CancelledError: The task was cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def delivered(function: Callable[[], T]) -> T:
    """Return the result of a function, for use in a future. A future cannot hold StopIteration.

    Raises:
        RuntimeError: The function raised StopIteration.
    """
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


class Handover(Awaitable[None]):
    """The result of work on another thread. In a coroutine, await it.

    In a thread without an event loop, the constructor waits for the work. Either way, an exception from the work is
    raised.
    """

    def __init__(self, done: Future[None]) -> None:
        self._done = done
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            done.result()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self._done).__await__()


def save_nothing(_content: bytes) -> Future[None]:
    """Return a completed future without storing anything, for tests that call a tool's function directly."""
    done: Future[None] = Future()
    done.set_result(None)
    return done
