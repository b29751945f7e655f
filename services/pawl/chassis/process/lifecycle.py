"""Start and stop of a process, and the loops that run in between."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

import uvloop

from pawl.chassis.process import logs, tasks
from pawl.chassis.process.start import StartError
from pawl.errors import DeadlineExceeded, DependencyUnavailable, Internal, Unavailable

_RESTART_SECONDS: Final = (0.1, 0.5, 1.0, 5.0)
# A loop that ran this long before it crashed starts over at the shortest pause.
_HEALTHY_SECONDS: Final = 30.0
_EXIT_USAGE: Final = 2
_TELL_SECONDS: Final = 60.0

_log = logs.get_logger(__name__)


def run_service(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Run `main` on uvloop until it returns, then end the process.

    SIGTERM and SIGINT set the event that `main` gets; a second one ends the
    process at once. Exit code 0 if `main` returned and no task failed unseen, 1
    if it raised, 2 if that was a StartError: whoever starts it again unchanged
    need not hope. A StartError, or a dependency that is missing at start, is
    one sentence instead of a traceback.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(main))
    sys.exit(code)


async def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> int:
    stop, reason = asyncio.Event(), ""
    loop = asyncio.get_running_loop()
    failed_unseen = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal reason
        if stop.is_set():
            os._exit(128 + number)
        _log.info("process.stopping", signal=number.name)
        reason = number.name
        stop.set()

    def on_unseen(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal failed_unseen
        failed_unseen = True
        _log.error("task.failed", detail=context.get("message", ""), exc_info=context.get("exception"))

    loop.set_exception_handler(on_unseen)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await main(stop)
    except (StartError, DependencyUnavailable) as error:
        _log.critical("process.failed", error=str(error))
        return _EXIT_USAGE if isinstance(error, StartError) else 1
    except Exception:  # noqa: BLE001  # the last place that can log it
        _log.critical("process.failed", exc_info=True)
        return 1
    _log.info("process.stopped", reason=reason)
    return int(failed_unseen)


class Background:
    """Loops that run beside the server; an async context manager that cancels them at its end.

    A loop that crashes is logged and started again, after 0.1 s at first and 5 s
    at most; one that returns is done. A dependency that cannot be reached, or
    whose own log has the reason, is one line for all loops of the process, not a
    traceback for each.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._told_at = float("-inf")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end(self._tasks)

    def start(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Run `loop` in a task called `name`, under supervision."""
        tasks.start(self._tasks, self._supervise(name, loop), name=name)

    async def _supervise(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        clock = asyncio.get_running_loop()
        crashes = 0
        while True:
            started = clock.time()
            try:
                await loop()
            except (Unavailable, DeadlineExceeded, Internal) as error:
                is_news = clock.time() - self._told_at >= _TELL_SECONDS
                (_log.warning if is_news else _log.debug)("background.interrupted", task=name, error=error.message)
                self._told_at = clock.time() if is_news else self._told_at
            except Exception:  # noqa: BLE001  # a crashed loop is started again
                _log.exception("background.crashed", task=name)
            else:
                return
            tasks.check_cancelled()
            crashes = 1 if clock.time() - started > _HEALTHY_SECONDS else crashes + 1
            await asyncio.sleep(_RESTART_SECONDS[min(crashes, len(_RESTART_SECONDS)) - 1])
