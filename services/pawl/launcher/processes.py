"""Supervises one process: starts it, restarts it after a crash, and stops it gracefully."""

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
# A process that dies after running for this long restarts without a long delay.
ALIVE_LONG_SECONDS = 30.0

# A process that has answered before is killed and restarted if it then does not answer for this long.
SILENT_SECONDS_MAX = 30.0

_PROBE_SECONDS = 0.03
_CHECK_SECONDS = 5.0
_EXIT_USAGE = 2
_ENDING = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGHUP}
)

# The addresses of a process by protocol: {"grpc": "127.0.0.1:7601", "metrics": ...}.
Addresses = Mapping[str, str]

_log = logs.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    # The working directory. None means that of the launcher, so that the user's relative paths work.
    folder: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A specification for starting, checking and stopping a process.

    `command` is called before each start. `listens` contains the addresses at which the process will listen. Peers can
    receive them before the process is ready. `probe` checks once whether the process is ready. It returns the addresses
    of the process, or None if it is not ready, and raises StartError if waiting is pointless. `answers` checks whether
    a ready process still answers, even if it is not healthy.
    """

    name: str
    command: Callable[[], Command]
    probe: Callable[[], Awaitable[Addresses | None]]
    answers: Callable[[], Awaitable[bool]] | None = None
    listens: Addresses = dataclasses.field(default_factory=dict)
    stop_signal: signal.Signals = signal.SIGTERM
    grace_seconds: float = 10.0
    account: tuple[int, int] | None = None


def shim(account: tuple[int, int] | None, death_signal: signal.Signals) -> tuple[str, ...]:
    """Return a command prefix that switches to the account, and makes the process end when this one does."""
    ids = "-" if account is None else "{}:{}".format(*account)
    return (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(int(death_signal)), ids)


def next_delay(previous: float | None, alive_seconds: float) -> float:
    """Return the delay before the next start.

    It doubles from 0.2 s to 10 s, and is reset once the process has run for 30 s.
    """
    if previous is None or alive_seconds >= ALIVE_LONG_SECONDS:
        return BACKOFF_FIRST_SECONDS
    return min(previous * 2, BACKOFF_MAX_SECONDS)


class Process:
    """A process that runs from `start` to `stop`. Both can be called repeatedly, in turn or concurrently."""

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
        """The process id, or None while the process is down."""
        return None if self._child is None or self._child.returncode is not None else self._child.pid

    @property
    def ready(self) -> bool:
        """True if the running process has become ready."""
        return self._ready.is_set()

    def start(self) -> None:
        """Start supervising the process. Has no effect if it is already supervised."""
        if self._task is None:
            self._stopping.clear()
            self._failure = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._supervise(), name=f"supervise-{self.name}")

    async def wait_ready(self, seconds: float) -> None:
        """Return once the process is ready, possibly after restarts.

        Raises:
            StartError: After a timeout, or immediately if the probe raises it or the process exits with code 2, which
                means that its configuration is invalid. After a timeout or an exit, the message contains the last line
                of the log.
        """
        if self._failure is None:
            raise StartError(f"{self.name} has not been started.")
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
        """Send a signal. If it is fatal, `wait_ready` waits for the next start.

        Raise ProcessLookupError if the process is down.
        """
        if self.pid is None:
            raise ProcessLookupError(f"{self.name} is down")
        if number in _ENDING:
            self._ready.clear()
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """Ask the process to end, and kill its process group after the grace time.

        Return when the process has ended.
        """
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
            started_at = loop.time()
            code: int | None = None
            try:
                code = await self._run_once()
            except OSError as error:  # The data folder is missing, or its disk is full.
                _log.error("process.not_started", process=self.name, error=str(error))
            if self._stopping.is_set():
                return
            delay = next_delay(delay, loop.time() - started_at)
            self.restarts += 1
            # A process that cannot start logs the reason itself, and `wait_ready` raises it.
            log = _log.debug if code == _EXIT_USAGE and self.addresses is None else _log.warning
            path = str(self.log.path)
            log("process.died", process=self.name, exit_code=code, restart_in_seconds=delay, log=path)
            await within(delay, self._stopping.wait())

    async def _run_once(self) -> int:
        running = self._child = await self._spawn()
        try:
            orphans.note(self._run_directory, self.name, running.pid)
        except OSError:
            _kill_group(running.pid)
            await running.wait()
            raise
        watching = asyncio.create_task(self._watch(running.pid))
        stopping = asyncio.create_task(self._end_on_stop(running))
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
        command = self.spec.command()
        with self.log.open() as output:
            return await asyncio.create_subprocess_exec(
                *shim(self.spec.account, self.spec.stop_signal),
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(command.environment),
                cwd=command.folder,
                # The process gets its own group, so that Ctrl-C reaches only the launcher, which stops all in order.
                start_new_session=True,
            )

    async def _watch(self, pid: int) -> None:
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

    async def _end_on_stop(self, running: asyncio.subprocess.Process) -> None:
        await self._stopping.wait()
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(self.spec.stop_signal)
            # A suspended process (SIGSTOP) cannot end.
            running.send_signal(signal.SIGCONT)
        await asyncio.sleep(self.spec.grace_seconds)
        _log.warning("process.killed", process=self.name, grace_seconds=self.spec.grace_seconds)
        _kill_group(running.pid)

    def _fail(self, error: StartError) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(error)


async def _falls_silent(answers: Callable[[], Awaitable[bool]]) -> None:
    """Return once a process has failed its health check for 30 seconds."""
    loop = asyncio.get_running_loop()
    answered_at = loop.time()
    while loop.time() - answered_at < SILENT_SECONDS_MAX:
        await asyncio.sleep(_CHECK_SECONDS)
        if await within(_CHECK_SECONDS, answers()):
            answered_at = loop.time()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
