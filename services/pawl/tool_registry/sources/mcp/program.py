"""MCP servers that run as programs on this machine: starting them, limiting them, and cleaning up after them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from pawl.chassis.process import logs
from pawl.tool_registry.sources.mcp.sandbox import Order
from pawl.tool_registry.sources.mcp.syscall_filter import syscall_filter
from pawl.tools.sdk.values import hide

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
# Limit per message, because a parsed array or object takes a hundred times as much memory as its bracket.
BRACKETS_MAX: Final = 200_000

_SERVICES: Final = str(Path(__file__).parents[4])
_PROGRAM: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); from pawl.tool_registry.sources.mcp.sandbox import main; main()"
)
_START_SECONDS: Final = 10.0
_EXIT_SECONDS: Final = 2.0
_KILL_SECONDS: Final = 8.0
_POLL_SECONDS: Final = 0.02
_LOG_CHARACTERS_MAX: Final = 500
_LOG_LINES_MAX: Final = 200
_LAST_LINES: Final = 30
_STDERR_BYTES: Final = 64 * 1024

_log = logs.get_logger(__name__)


def brackets_in(data: bytes) -> int:
    """Return an upper bound on the number of arrays and objects in a piece of JSON."""
    return data.count(b"[") + data.count(b"{")


class ProgramProblem(Exception):
    """Raised when a program does not start or is killed. The message is human-readable and never contains secrets."""


class ServerProgram:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reports: asyncio.StreamReader,
        control: asyncio.StreamWriter,
        *,
        name: str,
        secrets: Collection[str],
    ) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ProgramProblem("its standard input, output and error are not pipes")
        self.stdin = process.stdin
        # A line longer than MESSAGE_BYTES_MAX raises an error.
        self.stdout = process.stdout
        self._process = process
        self._stderr = process.stderr
        self._reports = reports
        self._control = control
        self._name = name
        self._secrets = secrets
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._logging = asyncio.create_task(self._log_stderr(), name=f"mcp.stderr {name}")

    async def start(self, order: Order) -> None:
        """Send the order to the sandbox, and return once the program is running.

        Raises:
            ProgramProblem: The program does not start.
        """
        self._control.write(json.dumps(asdict(order)).encode() + b"\n")
        try:
            async with asyncio.timeout(_START_SECONDS):
                problem = await self._report()
        except TimeoutError:
            raise ProgramProblem(f"it did not start within {_START_SECONDS:g} s") from None
        if problem:
            raise ProgramProblem(problem)

    async def end_reason(self, *, with_output: bool = True) -> str:
        """Return a human-readable reason why the program ended. Call this only after the program's output has ended.

        With `with_output`, the reason includes the last line of output that mentions an error or, if none does, the
        last line.
        """
        problem = ""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_EXIT_SECONDS):
                problem = await self._report()
        if problem:
            return problem
        if not with_output or not self._last_lines:
            return "the program ended"
        errors = [line for line in self._last_lines if "Error:" in line]
        return f"the program ended with the output {(errors or self._last_lines)[-1]!r}"

    async def end(self) -> None:
        """End the program and all its descendants, in bounded time."""
        self.stdin.close()
        # A program that follows the protocol exits when its input ends.
        if not await _ends(self._process, _EXIT_SECONDS):
            self._control.close()
            if not await _ends(self._process, _KILL_SECONDS):
                _log.error("mcp.program_not_stopped", source=self._name, process=self._process.pid)
                self._process.kill()
        self._control.close()
        self._logging.cancel()
        await asyncio.gather(self._logging, return_exceptions=True)
        # Leftover processes may still hold the pipes, so close the transport.
        getattr(self._process, "_transport").close()  # noqa: B009  # there is no public API, and mypy does not know the field
        # The loop closes pipes in its next iteration.
        await asyncio.sleep(0)

    async def _report(self) -> str:
        problem: str = json.loads(await self._reports.readline() or b"{}").get("problem", "")
        return hide(self._secrets, problem)

    async def _log_stderr(self) -> None:
        """Log the first lines, truncated. Keep reading, so that the program never blocks."""
        lines, rest = 0, b""
        while data := await self._stderr.read(_STDERR_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            rest = rest[:_STDERR_BYTES]
            for line in whole:
                text = line.decode(errors="replace").strip()[:_LOG_CHARACTERS_MAX]
                if text:
                    self._last_lines.append(hide(self._secrets, text))
                    lines += 1
                    if lines <= _LOG_LINES_MAX:
                        _log.debug("mcp.stderr", source=self._name, text=self._last_lines[-1])


@asynccontextmanager
async def running(order: Order, *, name: str, secrets: Collection[str]) -> AsyncGenerator[ServerProgram, None]:
    """Run a program in its own process group, with its own environment and an initially empty home folder.

    All processes of the program are killed on exit, or shortly after this process ends for any reason. The program's
    standard error is untrusted and may contain users' data. Some of it is logged at debug level.

    Raises:
        ProgramProblem: The program does not start.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        reports, control = await asyncio.open_unix_connection(sock=ours)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _PROGRAM,
            _SERVICES,
            str(theirs.fileno()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            limit=MESSAGE_BYTES_MAX,
            env={},
        )
    program = ServerProgram(process, reports, control, name=name, secrets=secrets)
    try:
        await program.start(_with_home(order))
        yield program
    finally:
        # Shielded from cancellation, because a leftover program would run forever. This takes bounded time.
        ending = asyncio.ensure_future(program.end())
        while not ending.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ending})


def _with_home(order: Order) -> Order:
    home = tempfile.mkdtemp(prefix="pawl-mcp-")
    path, language = os.environ.get("PATH", os.defpath), os.environ.get("LANG", "C.UTF-8")
    return replace(
        order,
        environment={"PATH": path, "HOME": home, "TMPDIR": home, "LANG": language, **order.environment},
        home=home,
        is_confined=order.is_confined or bool(order.readable or order.writable),
        syscall_filter=syscall_filter().hex(),
    )


async def _ends(process: asyncio.subprocess.Process, seconds: float) -> bool:
    # Do not use `process.wait()`, which also waits for pipes that nothing reads.
    deadline = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(_POLL_SECONDS)
    return process.returncode is not None
