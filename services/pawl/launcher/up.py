"""`pawl up`: the suite in the foreground, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.launcher import screen
from pawl.launcher.folder import problem_of
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite

_CANNOT_START = 2
_LOOK_SECONDS = 2.0


async def _nothing(_: SuiteOptions) -> None:
    """Do nothing."""


def up(options: SuiteOptions, when_ready: Callable[[SuiteOptions], Awaitable[None]] = _nothing) -> int:
    """Runs the suite until SIGTERM, SIGINT or SIGHUP, then stops it in order; does `when_ready` once it answers.

    Returns the exit code: 0 after an orderly stop, 2 with one sentence on standard error if it could not start.
    """
    logs.configure(service="launcher", instance_id=str(os.getpid()), level="info", log_format="auto")
    try:
        asyncio.run(run_until_told(Suite(options), when_ready))
    except StartError as error:
        print(error, file=sys.stderr)
        return _CANNOT_START
    return 0


async def run_until_told(suite: Suite, when_ready: Callable[[SuiteOptions], Awaitable[None]]) -> None:
    """Run a suite until a signal, then stop it.

    Raises:
        StartError: it could not start, or its data folder is gone.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    print(f"Starting in {suite.options.data} ...", flush=True)
    starting = asyncio.create_task(suite.start())
    told = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Future[Any]] = [starting, told]
    try:
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            screen.show(suite.endpoints)
            for line in suite.broken_tools:
                print(f"PAWL_TOOLS: {line}", flush=True)
            tasks.append(asyncio.ensure_future(when_ready(suite.options)))
            await _wait(told, suite.options.data)
            print("Stopping.", flush=True)
    except StartError as error:
        raise StartError(problem_of(suite.options.data) or str(error)) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await suite.stop()


async def _wait(told: asyncio.Task[bool], data: Path) -> None:
    """Return after a signal; say once what is wrong with the disk.

    Raises:
        StartError: the data folder is gone.
    """
    said = ""
    while not (await asyncio.wait({told}, timeout=_LOOK_SECONDS))[0]:
        problem = problem_of(data)
        if problem and not data.exists():
            raise StartError(problem)
        if problem and not said:
            print(problem, file=sys.stderr, flush=True)
        said = problem
