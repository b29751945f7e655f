"""Messages of MCP over the pipes of a program.

The package's own transport keeps a line of any length, and does not limit what
it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

import anyio
import mcp.types
from anyio.abc import ObjectSendStream
from anyio.streams.memory import MemoryObjectReceiveStream
from mcp.shared.message import SessionMessage

from pawl.chassis.clock import Clock
from pawl.tool_registry.adapters.mcp.pace import Paced, Streams, Wire
from pawl.tool_registry.adapters.mcp.program import BRACKETS_MAX, MESSAGE_BYTES_MAX, Program, brackets_in

_STALL_SECONDS: Final = 10.0
_WRITES_MAX: Final = 64
_GARBAGE_LINES_MAX: Final = 100


@asynccontextmanager
async def stdio_transport(program: Program, wire: Wire, clock: Clock) -> AsyncGenerator[Streams, None]:
    """Start a program and give the streams to it. `wire` says why they ended.

    Raises:
        ProgramProblem: it cannot be started.
    """
    async with program:
        incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](_WRITES_MAX)
        tasks = [
            asyncio.create_task(_read(program, wire, incoming), name="mcp.read"),
            asyncio.create_task(_write(program, wire, outgoing, incoming), name="mcp.write"),
        ]
        try:
            yield Paced(read_stream, clock), write_stream
        finally:
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (incoming, read_stream, write_stream, outgoing):
                stream.close()


async def _read(program: Program, wire: Wire, incoming: ObjectSendStream[SessionMessage | Exception]) -> None:
    """Pass messages on, line by line, until the program's output ends or cannot be borne any longer."""
    garbage = 0
    async with incoming:
        while garbage <= _GARBAGE_LINES_MAX:
            try:
                line = await program.stdout.readline()
            except ValueError:
                wire.end(f"it sent a message of more than {MESSAGE_BYTES_MAX} bytes", is_too_large=True)
                return
            if brackets_in(line) > BRACKETS_MAX:
                wire.end(f"it sent a message of more than {BRACKETS_MAX} brackets", is_too_large=True)
                return
            if not line:
                wire.end(await program.obituary(with_words=not wire.was_used))
                return
            try:
                message = mcp.types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                garbage += bool(line.strip())
                continue
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await incoming.send(SessionMessage(message))
        wire.end("it writes to its standard output what is no message of MCP")


async def _write(
    program: Program,
    wire: Wire,
    outgoing: MemoryObjectReceiveStream[SessionMessage],
    incoming: ObjectSendStream[SessionMessage | Exception],
) -> None:
    """Send messages, each a line, until the program does not take them any more."""
    async with outgoing:
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    program.stdin.write(text.encode() + b"\n")
                    await program.stdin.drain()
            except TimeoutError:
                wire.end(f"it has not read what it was sent for {_STALL_SECONDS:g} s")
                await incoming.aclose()
                return
            except (OSError, RuntimeError):
                return  # It is gone; the reader says so.
