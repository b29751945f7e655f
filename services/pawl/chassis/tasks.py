"""Ending tasks for sure.

A cancellation can get lost: `asyncio.wait_for` before Python 3.12, on which
nats-py is built, drops it when what it waited for is done at the same moment.
A loop then goes on, and whoever waits for its end waits for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

_AGAIN_SECONDS: Final = 3.0


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, again if they go on, and return when all have ended. What they raise is dropped."""
    every = list(tasks)
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
