"""An MCP server as a program of this machine: started, limited, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from pawl.chassis import logs
from pawl.tool_registry.adapters.mcp.syscall_filter import syscall_filter
from pawl.tool_registry.sdk.values import hide

MEMORY_BYTES_DEFAULT: Final = 1024**3
PROCESSES_DEFAULT: Final = 64
MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
BRACKETS_MAX: Final = 200_000
"""Of a message: what they open takes a hundred times their room, and its time to be read."""

_SANDBOX: Final = Path(__file__).with_name("sandbox.py")
_START_SECONDS: Final = 10.0
_LEAVE_SECONDS: Final = 2.0
_KILL_SECONDS: Final = 8.0
_POLL_SECONDS: Final = 0.02
_LOG_CHARACTERS_MAX: Final = 500
_LOG_LINES_MAX: Final = 200
_LAST_LINES: Final = 30
_STDERR_BYTES: Final = 64 * 1024

_log = logs.get_logger(__name__)


def brackets_in(data: bytes) -> int:
    """Return how many arrays and objects a piece of JSON can have at most."""
    return data.count(b"[") + data.count(b"{")


class ProgramProblem(Exception):
    """A program did not start, or was ended; the message is for people and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOrder:
    """The program to start, and what it may reach beside the system's and a folder of its own. Paths are absolute."""

    command: Sequence[str]
    environment: dict[str, str]
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    private: Sequence[str] = ()
    """The paths that it never reaches, also where they lie in a folder that it may read."""
    reads_all: bool = False
    """It may read what the registry's user may."""
    is_confined: bool = True
    """False: it is the registry's user himself, unless folders are named."""
    memory_bytes_max: int = MEMORY_BYTES_DEFAULT
    processes_max: int = PROCESSES_DEFAULT


class Program:
    """A running program; an async context manager.

    It has a process group, an empty home folder and an environment of its own.
    All of it is dead when the context is left, and soon after this process is,
    however that ends. Its standard error is text of strangers, and may hold what
    users sent: it goes into the log at debug only, in part.
    """

    def __init__(self, order: ProgramOrder, *, name: str, secrets: Collection[str]) -> None:
        self._order = order
        self._name = name
        self._secrets = secrets
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._stderr: asyncio.Task[None] | None = None
        self._last_words: deque[str] = deque(maxlen=_LAST_LINES)

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # noqa: FBT003  # its one parameter has no name
        self._control = ours
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-I",
                    "-S",
                    str(_SANDBOX),
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    limit=MESSAGE_BYTES_MAX,
                    env={},
                )
            self._stderr = asyncio.create_task(self._log_stderr(), name=f"mcp.stderr {self._name}")
            async with asyncio.timeout(_START_SECONDS):
                await asyncio.get_running_loop().sock_sendall(ours, json.dumps(self._filled()).encode() + b"\n")
                problem = await self._hear()
            if problem:
                raise ProgramProblem(problem)
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, TimeoutError):
                raise ProgramProblem(f"it did not start within {_START_SECONDS:g} s") from None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        # Not to be cut short: what is left behind here would run for ever. It takes bounded time.
        ending = asyncio.ensure_future(self._end())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        ending.result()

    @property
    def stdin(self) -> asyncio.StreamWriter:
        """The stream from which the program reads."""
        if self._process is None or self._process.stdin is None:
            raise ProgramProblem("it is not running")
        return self._process.stdin

    @property
    def stdout(self) -> asyncio.StreamReader:
        """The stream to which the program writes; no line longer than MESSAGE_BYTES_MAX can be read."""
        if self._process is None or self._process.stdout is None:
            raise ProgramProblem("it is not running")
        return self._process.stdout

    async def obituary(self, *, with_words: bool = True) -> str:
        """Return why the program ended, once its output has: for people, `with_words` of its own.

        These are its last line that names an error, or else its last one.
        """
        problem = ""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                problem = await self._hear()
        if problem:
            return problem
        if not with_words or not self._last_words:
            return "the program ended"
        errors = [line for line in self._last_words if "Error:" in line]
        return f"the program ended, saying {(errors or self._last_words)[-1]!r}"

    def _filled(self) -> dict[str, Any]:
        """Return the order as the sandbox reads it, with a new home folder."""
        home = tempfile.mkdtemp(prefix="pawl-mcp-")
        order = self._order
        own = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": home,
            "TMPDIR": home,
            "LANG": os.environ.get("LANG", "C.UTF-8"),
        }
        return asdict(order) | {
            "environment": own | order.environment,
            "home": home,
            "is_confined": order.is_confined or bool(order.readable or order.writable),
            "syscall_filter": syscall_filter().hex(),
        }

    async def _hear(self) -> str:
        """Return the next thing that the sandbox says: a problem, or an empty text."""
        if self._control is None:
            return ""
        data = b""
        while not data.endswith(b"\n"):
            part = await asyncio.get_running_loop().sock_recv(self._control, 4096)
            if not part:
                return ""
            data += part
        said: str = json.loads(data).get("problem", "")
        return hide(self._secrets, said)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            # One that follows the protocol leaves when its input ends.
            if not await _ends(process, _LEAVE_SECONDS):
                self._close_control()
                if not await _ends(process, _KILL_SECONDS):
                    _log.error("mcp.program_will_not_end", source=self._name, process=process.pid)
                    process.kill()
        self._close_control()
        if self._stderr is not None:
            self._stderr.cancel()
            await asyncio.gather(self._stderr, return_exceptions=True)
        if process is not None:
            # The pipes may still be held by what the program left; the transport goes now.
            getattr(process, "_transport").close()  # noqa: B009  # there is no public way, and mypy knows no such field
            # The loop closes pipes in its next turn.
            await asyncio.sleep(0)

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()

    async def _log_stderr(self) -> None:
        """Put lines into the log, cut, and no more than so many; read on, so that the program never waits."""
        if self._process is None or self._process.stderr is None:
            return
        lines, rest = 0, b""
        while data := await self._process.stderr.read(_STDERR_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            rest = rest[:_STDERR_BYTES]
            for line in whole:
                text = line.decode(errors="replace").strip()[:_LOG_CHARACTERS_MAX]
                if text:
                    self._last_words.append(hide(self._secrets, text))
                    lines += 1
                    if lines <= _LOG_LINES_MAX:
                        _log.debug("mcp.stderr", source=self._name, text=self._last_words[-1])


async def _ends(process: asyncio.subprocess.Process, seconds: float) -> bool:
    # Not `process.wait()`, which also waits for the end of pipes that nobody reads any more.
    give_up = asyncio.get_running_loop().time() + seconds
    while process.returncode is None and asyncio.get_running_loop().time() < give_up:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(_POLL_SECONDS)
    return process.returncode is not None
