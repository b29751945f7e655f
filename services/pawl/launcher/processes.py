"""One supervised process: started, watched until it is ready, started again when it dies, stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.chassis.process.tasks import shield, within
from pawl.launcher import child, orphans
from pawl.launcher.logfile import LogFile

BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_MAX_SECONDS = 10.0
ALIVE_LONG_SECONDS = 30.0
"""The life after which a process is taken to have died of something new, and starts again without delay."""

SILENT_SECONDS_MAX = 30.0
"""The silence after which a process that has answered before is killed, and starts again."""

_PROBE_SECONDS = 0.03
_ASK_SECONDS = 5.0
_EXIT_USAGE = 2
_ENDING = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGHUP}
)

Addresses = Mapping[str, str]
"""The addresses of a process, by protocol: {"grpc": "127.0.0.1:7601", "metrics": ...}."""

_log = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to execute."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None = None
    """The folder to run it in; None for that of the launcher, so that relative paths mean what the user meant."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The way to start a process, see that it is ready, and stop it.

    `command` is called before each start with the addresses of the time before, so that a process that took free ports
    gets the same ones again: its peers know them. `probe` makes one attempt to find out whether the process is ready
    and returns its addresses, or None for not yet; it raises StartError when waiting is pointless. `answers` asks one
    that was ready whether it still answers, whatever it says.
    """

    name: str
    command: Callable[[Addresses | None], Command]
    probe: Callable[[], Awaitable[Addresses | None]]
    answers: Callable[[], Awaitable[bool]] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    grace_seconds: float = 10.0
    account: tuple[int, int] | None = None


def shim(account: tuple[int, int] | None, death_signal: signal.Signals) -> tuple[str, ...]:
    """Return the words before a command that make it run under that account and end with this process."""
    ids = "-" if account is None else "{}:{}".format(*account)
    return (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(int(death_signal)), ids)


def next_delay(previous: float | None, alive_seconds: float) -> float:
    """Return the wait before the next start: 0.2 s, doubled each time up to 10 s, afresh after 30 s alive."""
    if previous is None or alive_seconds >= ALIVE_LONG_SECONDS:
        return BACKOFF_FIRST_SECONDS
    return min(previous * 2, BACKOFF_MAX_SECONDS)


class Process:
    """Keeps one process running from `start` to `stop`. Both may be called again, in turn, and by several at once."""

    def __init__(
        self, spec: ProcessSpec, *, run_directory: Path, log_directory: Path, changed: Callable[[], None]
    ) -> None:
        self.spec = spec
        self.addresses: Addresses | None = None
        self.restarts = 0
        self.log = LogFile(log_directory / f"{spec.name}.log")
        self._run_directory = run_directory
        self._changed = changed
        self._child: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._ready = asyncio.Event()
        self._failure: asyncio.Future[StartError] | None = None

    @property
    def name(self) -> str:
        """The name of the process, unique in the suite."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """The process id; None while it is down."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    @property
    def ready(self) -> bool:
        """True if the running process has been seen ready."""
        return self._ready.is_set()

    def start(self) -> None:
        """Starts supervising. Does nothing if that is going on."""
        if self._task is None:
            self._stopping.clear()
            self._failure = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(), name=f"supervise-{self.name}")

    async def wait_ready(self, seconds: float) -> None:
        """Returns once the process is ready, if need be after restarts.

        Raises StartError with the last line of its log if that takes too long, or at once if the process says by exit
        code 2 that it cannot work as it was told to.
        """
        if self._failure is None:
            raise StartError(f"{self.name} is not started.")
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            either: set[asyncio.Future[Any]] = {ready, self._failure}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.is_set():
                return
            if self._failure.done():
                raise self._failure.result()
            log = f"Its log {self.log.path} ends with: {self.log.last_line()}"
            raise StartError(f"{self.name} was not ready within {seconds:g} seconds. {log}")
        finally:
            ready.cancel()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal. After one that ends processes, `wait_ready` waits for the next incarnation."""
        if self.pid is None:
            raise ProcessLookupError(f"{self.name} is down")
        if number in _ENDING:
            self._ready.clear()
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """Asks the process to end, kills it with all it started if it does not, and returns when it is gone."""
        self._stopping.set()
        task = self._task
        if task is not None:
            await shield(task)
            if self._task is task:
                self._task = None

    async def _supervise(self) -> None:
        delay: float | None = None
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            begun = loop.time()
            code: int | None = None
            try:
                code = await self._run_once()
            except OSError as error:  # The data folder is gone, or its disk is full.
                _log.error("process.not_started", process=self.name, error=str(error))
            if self._stopping.is_set():
                return
            delay = next_delay(delay, loop.time() - begun)
            self.restarts += 1
            # One that could never start says why itself, and `wait_ready` raises that.
            log = _log.debug if code == _EXIT_USAGE and self.addresses is None else _log.warning
            path = str(self.log.path)
            log("process.died", process=self.name, exit_code=code, restart_in_seconds=delay, log=path)
            await within(delay, self._stopping.wait())

    async def _run_once(self) -> int:
        """Runs one incarnation from start to end and returns its exit code."""
        running = self._child = await self._spawn()
        try:
            orphans.note(self._run_directory, self.name, running.pid)
        except OSError:
            _kill_group(running.pid)
            await running.wait()
            raise
        watching = asyncio.create_task(self._watch(running.pid))
        stopping = asyncio.create_task(self._end_when_told(running))
        try:
            code = await running.wait()
        finally:
            for task in (watching, stopping):
                task.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)
        _kill_group(running.pid)
        self._ready.clear()
        orphans.forget(self._run_directory, self.name)
        if code == _EXIT_USAGE:
            self._fail(StartError(f"{self.name} cannot start: {self.log.last_line()}"))
        self._changed()
        return code

    async def _spawn(self) -> asyncio.subprocess.Process:
        command = self.spec.command(self.addresses)
        with self.log.open() as output:
            return await asyncio.create_subprocess_exec(
                *shim(self.spec.account, self.spec.stop_signal),
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(command.environment),
                cwd=command.folder,
                # A group of its own, so that Ctrl-C reaches the launcher only and the stop goes in order.
                start_new_session=True,
            )

    async def _watch(self, pid: int) -> None:
        """Probes until the process is ready, and kills it if it falls silent then."""
        while not self._ready.is_set():
            try:
                addresses = await self.spec.probe()
            except StartError as error:
                self._fail(error)
                return
            if addresses is not None:
                self.addresses = addresses
                self._ready.set()
                self._changed()
            else:
                await asyncio.sleep(_PROBE_SECONDS)
        if self.spec.answers is not None:
            await _falls_silent(self.spec.answers)
            _log.warning("process.silent", process=self.name, silent_seconds=SILENT_SECONDS_MAX)
            _kill_group(pid)

    async def _end_when_told(self, running: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(self.spec.stop_signal)
            # Whoever is stopped (SIGSTOP) cannot end.
            running.send_signal(signal.SIGCONT)
        await asyncio.sleep(self.spec.grace_seconds)
        _log.warning("process.killed", process=self.name, grace_seconds=self.spec.grace_seconds)
        _kill_group(running.pid)

    def _fail(self, error: StartError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)


async def _falls_silent(answers: Callable[[], Awaitable[bool]]) -> None:
    """Return once a ready process has not answered its health check for 30 seconds."""
    loop = asyncio.get_running_loop()
    answered_at = loop.time()
    while loop.time() - answered_at < SILENT_SECONDS_MAX:
        await asyncio.sleep(_ASK_SECONDS)
        if await within(_ASK_SECONDS, answers()):
            answered_at = loop.time()


def _kill_group(pid: int) -> None:
    """Kills what is left of the group that the process led: itself, and what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
