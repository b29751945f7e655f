"""Implements `pawl up`, which runs the suite in the foreground until a signal."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from pawl.chassis.identity.local_key import LOCAL_KEY
from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import Endpoints
from pawl.launcher.folder import problem_of
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from pawl.server.process import log_setup

_NEXT = (
    ("open the console", "console"),
    ("chat", "chat"),
    ("start a run and watch it", 'run "what is 17 * 23"'),
    ("see pending approvals", "inbox"),
)

# Callers have their own keys, so commands cannot find a key.
_NO_KEY: Final = ("set your key first", "export PAWL_API_KEY=KEY")


def show(endpoints: Endpoints, *, console: Console | None = None) -> None:
    console = console or Console()
    console.print(Text("Pawl is running", "bold"))
    for name, address, note in rows(endpoints):
        console.print(f"{name:<18} {address:<28} {note}".rstrip(), soft_wrap=True, highlight=False, markup=False)
    console.print(f"{'data and logs:':<26}{endpoints.data}", soft_wrap=True, highlight=False, markup=False)
    for purpose, command in commands(endpoints):
        console.print(Text.assemble(f"{purpose + ':':<26}", (command, "bold")), soft_wrap=True)
    console.print("Ctrl-C stops everything.", highlight=False)


def rows(endpoints: Endpoints) -> list[tuple[str, str, str]]:
    """Return the name, the address and a note for everything that listens."""
    http = "https" if endpoints.authority else "http"
    # HTTP addresses come first, because users open them.
    services = sorted(endpoints.services.items(), key=lambda each: (not any(one.http for one in each[1]), each[0]))
    found = [
        (
            name if number == 0 else f"{name} ({number + 1})",
            f"{http}://{replica.http}" if replica.http else replica.grpc,
            f"{http}://{replica.metrics}/metrics",
        )
        for name, replicas in services
        for number, replica in enumerate(replicas)
    ]
    if endpoints.model_base_url:
        found.append(("model", endpoints.model_base_url, "scripted: rules, not a language model"))
    found.append(
        ("PostgreSQL", endpoints.postgres or "PAWL_DATABASE_URL", "database pawl" if endpoints.postgres else "")
    )
    found.append(("NATS", endpoints.nats or "PAWL_NATS_URL", "JetStream" if endpoints.nats else ""))
    return found


def commands(endpoints: Endpoints) -> list[tuple[str, str]]:
    found = Path(endpoints.data) == Path(".pawl").resolve()
    suite = "" if found else f" --data {shlex.quote(endpoints.data)}"
    program = _program()
    key = Path(endpoints.secrets) / LOCAL_KEY
    has_key = key.exists()
    subscriber = Path(endpoints.secrets) / "nats-subscriber.url"
    listen = f"nats sub --server \"$(cat {shlex.quote(str(subscriber))})\" 'pawl.v1.>'"
    return [
        *([] if has_key else [_NO_KEY]),
        *((purpose, f"{program}{suite} {command}") for purpose, command in _NEXT),
        *([("watch all events", listen)] if endpoints.nats else []),
        *([("key for programs", f"cat {shlex.quote(str(key))}")] if has_key else []),
    ]


def _program() -> str:
    """Return `pawl` if the shell finds this program by that name.

    Otherwise, return the path that started this process.
    """
    started = Path(sys.argv[0])
    if started.name != "pawl" or not started.is_file():
        return "pawl"
    found = shutil.which("pawl")
    same = found is not None and Path(found).resolve() == started.resolve()
    return "pawl" if same else shlex.quote(sys.argv[0])


_CANNOT_START = 2
_POLL_SECONDS = 2.0


async def _nothing(_: Suite) -> None:
    pass


def up(options: SuiteOptions, when_ready: Callable[[Suite], Awaitable[None]] = _nothing) -> int:
    """Run the suite until SIGTERM, SIGINT or SIGHUP, then stop it in order. Calls `when_ready` once it is ready.

    Return the exit code: 0 after an orderly stop, or 2 after an error, which is printed to standard error.
    """
    log_setup.configure(service="launcher", instance_id=str(os.getpid()), level="info", log_format="auto")
    try:
        asyncio.run(run_until_signal(Suite(options), when_ready))
    except StartError as error:
        print(error, file=sys.stderr)
        return _CANNOT_START
    return 0


async def run_until_signal(suite: Suite, when_ready: Callable[[Suite], Awaitable[None]]) -> None:
    """Run a suite until a signal arrives, and then stop it.

    Raises:
        StartError: The suite could not start, or its data folder has been removed.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    print(f"Starting in {suite.options.data} ...", flush=True)
    starting = asyncio.create_task(suite.start())
    stopping = asyncio.create_task(stop.wait())
    tasks: list[asyncio.Future[Any]] = [starting, stopping]
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            show(suite.endpoints)
            for line in suite.broken_tools:
                print(line, flush=True)
            tasks.append(asyncio.ensure_future(when_ready(suite)))
            await _wait(stopping, suite.options.data)
            print("Stopping.", flush=True)
    except StartError as error:
        raise StartError(problem_of(suite.options.data) or str(error)) from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await suite.stop()


async def _wait(stopping: asyncio.Task[bool], data: Path) -> None:
    """Return after a signal. Until then, report a problem with the disk when it first occurs.

    Raises:
        StartError: The data folder has been removed.
    """
    reported = ""
    while not (await asyncio.wait({stopping}, timeout=_POLL_SECONDS))[0]:
        problem = problem_of(data)
        if problem and not data.exists():
            raise StartError(problem)
        if problem and not reported:
            print(problem, file=sys.stderr, flush=True)
        reported = problem
