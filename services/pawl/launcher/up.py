"""`pawl up`: the suite in the foreground, until a signal ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from pawl.chassis import logs
from pawl.chassis.start import StartError
from pawl.launcher import screen
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite

_CANNOT_START = 2


async def _nothing(_: SuiteOptions) -> None:
    """Do nothing."""


def up(options: SuiteOptions, when_ready: Callable[[SuiteOptions], Awaitable[None]] = _nothing) -> int:
    """Runs the suite until SIGTERM, SIGINT or SIGHUP, then stops it in order; does `when_ready` once it answers.

    Returns the exit code: 0 after an orderly stop, 2 with one sentence on standard error if it could not start.
    """
    logs.configure(service="launcher", instance_id=str(os.getpid()), level="info", log_format="auto")
    try:
        asyncio.run(_run(Suite(options), when_ready))
    except StartError as error:
        print(error, file=sys.stderr)
        return _CANNOT_START
    return 0


async def _run(suite: Suite, when_ready: Callable[[SuiteOptions], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    print(f"Starting in {suite.options.data} ...", flush=True)
    starting = asyncio.create_task(suite.start())
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, told}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            screen.show(suite.endpoints)
            for line in suite.broken_tools:
                print(f"PAWL_TOOLS: {line}", flush=True)
            await when_ready(suite.options)
            await told
            print("Stopping.", flush=True)
    finally:
        for task in (starting, told):
            task.cancel()
        await asyncio.gather(starting, told, return_exceptions=True)
        await suite.stop()
