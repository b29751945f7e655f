"""Tasks that are kept until they end, and end for sure.

A cancellation can get lost: `asyncio.wait_for` before Python 3.12, on which
nats-py is built, drops it when what it waited for is done at the same moment.
A loop then goes on, and whoever waits for its end waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextvars import Context
from typing import Any, Final, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")

_AGAIN_SECONDS: Final = 3.0

_shielded: Final[set[asyncio.Future[Any]]] = set()


def start(
    held: set[asyncio.Task[T]], work: Coroutine[Any, Any, T], *, name: str, context: Context | None = None
) -> asyncio.Task[T]:
    """Return a task that does this work; it is in `held` until it is done, for a loop keeps no task alive."""
    return hold(held, asyncio.get_running_loop().create_task(work, name=name, context=context))


def hold(held: set[F], work: F) -> F:
    """Keep a task, or another future, in `held` until it is done, and return it."""
    held.add(work)
    work.add_done_callback(held.discard)
    return work


async def within(seconds: float | None, work: Awaitable[T]) -> T | None:
    """Return what `work` gives, or None after so many seconds, when it is cancelled; None seconds are for ever.

    A TimeoutError of its own counts as the end of the time.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        return None


async def shield(work: Awaitable[T]) -> T:
    """Return what `work` gives or raises; it goes on when the caller is cancelled, and is no more told of.

    With `asyncio.shield` an exception that comes after that is one that nobody has seen: a fault of the process.
    """
    future = asyncio.ensure_future(work)
    if future not in _shielded:
        hold(_shielded, future).add_done_callback(_see)
    try:
        await asyncio.wait({future})
        return future.result()
    finally:
        del work, future  # What is raised keeps this frame, which must not keep what is raised.


def _see(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, again if they go on, and return when all have ended. What they raise is dropped.

    So it is when the caller is cancelled meanwhile.
    """
    every = list(tasks)
    for task in every:
        task.add_done_callback(_see)
    pending = {task for task in every if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_SECONDS)
    await asyncio.gather(*every, return_exceptions=True)


def check_cancelled() -> None:
    """Return unless this task was asked to end and the request got lost on its way.

    Raises:
        asyncio.CancelledError: it was.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def delivered(function: Callable[[], T]) -> T:
    """Call a function in a thread; no future takes StopIteration, and Python makes the same of a coroutine's.

    Raises:
        RuntimeError: it raised StopIteration.
    """
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("the function raised StopIteration") from error


class Handover(Awaitable[None]):
    """Something that is done elsewhere: a coroutine awaits it; in a thread without a loop it is done once this is made.

    Raises what its future does.
    """

    def __init__(self, done: Future[None]) -> None:
        self._done = done
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            done.result()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.wrap_future(self._done).__await__()


def kept(_content: bytes) -> Future[None]:
    """Return at once; for a test of a function, which keeps nothing."""
    done: Future[None] = Future()
    done.set_result(None)
    return done
