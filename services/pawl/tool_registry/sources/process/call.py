"""The registry's side of a process that runs one call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any, Final, Self

from pawl.chassis.strict_json import loads
from pawl.errors import InvalidJson, TooLarge
from pawl.tool_registry.sources.process.messages import (
    ERRORS,
    Answer,
    Answered,
    Call,
    Cancel,
    GarbledMessage,
    GetSecret,
    Raised,
    ReportProgress,
    Returned,
    SaveCheckpoint,
    frame,
    read_message,
)
from pawl.tools.rules.definition import CHECKPOINT_BYTES_MAX
from pawl.tools.sdk.context import ToolContext, ToolError

_MESSAGE_OVERHEAD_BYTES: Final = 1024 * 1024
_PROGRESS_INTERVAL_SECONDS: Final = 0.01
_SETTINGS_PREFIXES: Final = ("PAWL_", "OPENAI_", "GRPC_EXPERIMENTS")
# Grace period for a cancelled tool. It is half of the executor's, which leaves time for killing the process.
_UNWIND_SECONDS: Final = 0.5
_KILL_SECONDS: Final = 5.0


async def spawn(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Start the `main` function of a module in a new process, with this process's sys.path and environment.

    The registry's settings are not passed on.

    Raises:
        OSError: The system cannot start another process.
    """
    program = (
        "import sys; sys.path[:] = sys.argv[1].split(chr(10));"
        f" from pawl.tool_registry.sources.process.{module} import main; main()"
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        "\n".join(sys.path),
        *arguments,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_PREFIXES)},
        **options,
    )


class CallProcess:
    """A process that is ready to run one call. Always call `end`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        channel: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._process = process
        self._control_reader, self._control_writer = control
        self._reader, self._writer = channel

    @classmethod
    async def start(cls, *, shows_output: bool) -> Self:
        """Start a process with the sys.path and environment of this process, but without the registry's settings.

        Raises:
            OSError: The system cannot start another process.
        """
        control, its_control = socket.socketpair()
        channel, its_channel = socket.socketpair()
        numbers = (its_control.fileno(), its_channel.fileno())
        try:
            process = await spawn(
                "child",
                *map(str, numbers),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=None if shows_output else asyncio.subprocess.DEVNULL,
                pass_fds=numbers,
            )
        except BaseException:
            control.close()
            channel.close()
            raise
        finally:
            its_control.close()
            its_channel.close()
        ends = [await asyncio.open_unix_connection(sock=end) for end in (control, channel)]
        return cls(process, *ends)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def converse(self, call: Call, context: ToolContext) -> Answer | None:
        """Run the call and return its answer, or None if the process ended without an answer.

        If this is cancelled, the tool is notified and has half a second to finish.

        Raises:
            GarbledMessage: The tool wrote to the channel.
        """
        self._writer.write(frame(call))
        exchange = asyncio.ensure_future(self._exchange(call.content_bytes_max + _MESSAGE_OVERHEAD_BYTES, context))
        exited = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({exchange, exited}, return_when=asyncio.FIRST_COMPLETED)
            # Messages sent before the process ended may still be in transit.
            await asyncio.wait({exchange}, timeout=_UNWIND_SECONDS)
            return exchange.result() if exchange.done() else None
        except asyncio.CancelledError:
            self._writer.write(frame(Cancel()))
            await asyncio.wait({exchange}, timeout=_UNWIND_SECONDS)
            raise
        finally:
            for task in (exchange, exited):
                task.cancel()
            await asyncio.gather(exchange, exited, return_exceptions=True)

    async def _exchange(self, bytes_max: int, context: ToolContext) -> Answer | None:
        loop = asyncio.get_running_loop()
        reported_at = 0.0
        while True:
            match await read_message(self._reader, bytes_max):
                case GetSecret() | SaveCheckpoint() as question:
                    self._writer.write(frame(await _answered(context, question)))
                    await self._writer.drain()
                case ReportProgress(fraction=fraction, message=message):
                    context.progress(fraction, message)
                    if loop.time() - reported_at < _PROGRESS_INTERVAL_SECONDS:
                        # The worker itself sends less often, but a tool that writes to the channel must not flood the
                        # loop.
                        await asyncio.sleep(_PROGRESS_INTERVAL_SECONDS)
                    reported_at = loop.time()
                case Returned() | Raised() | None as answer:
                    return answer

    async def end(self) -> int | None:
        """Kill all processes that are still running. Return the worker's wait status, or None if it is unknown.

        Idempotent.
        """
        status = b""
        with contextlib.suppress(OSError, RuntimeError):
            self._control_writer.write_eof()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                status = await self._control_reader.read()
                await self._process.wait()
        if self._process.returncode is None:
            # The tool has stopped its guard. On Linux, the worker dies with the guard.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        for writer in (self._control_writer, self._writer):
            # Abort instead of closing, because the peer may not read the remaining data.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        return int(status) if status.isdigit() else None


async def _answered(context: ToolContext, question: GetSecret | SaveCheckpoint) -> Answered:
    try:
        if isinstance(question, GetSecret):
            return Answered(value=context.secret(question.name))
        await context.checkpoint(loads(question.content, bytes_max=CHECKPOINT_BYTES_MAX))
    except tuple(ERRORS.values()) as error:
        name = type(error).__name__
        return Answered(error=name if name in ERRORS else ToolError.__name__, text=str(error))
    except (InvalidJson, TooLarge):
        raise GarbledMessage from None
    return Answered()
