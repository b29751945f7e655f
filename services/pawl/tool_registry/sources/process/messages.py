"""The messages of the registry and the process of a call: a length in four bytes, then MessagePack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, Literal, TypeAlias

import msgspec

from pawl.tool_registry.rules.execution import InverseCall
from pawl.tool_registry.sdk.context import SecretNotFound, Superseded, ToolCancelled, ToolError

_LENGTH_BYTES: Final = 4


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this; sent once, first."""

    import_name: str
    folder: str
    """The folder of tools that the module is in; empty for an installed one."""
    tool_name: str
    arguments: dict[str, Any]
    memory_bytes: int
    cpu_seconds: int
    content_bytes_max: int
    context: dict[str, Any]
    """The public fields of the tool's context."""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The result is not wanted any more."""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the oldest question: a secret, or that a checkpoint is kept; `error` names one of ERRORS if not."""

    value: str = ""
    error: str = ""
    text: str = ""


class CheckpointSaid(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep this, which is JSON."""

    content: bytes


class SecretAsked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The tool asks for a secret."""

    name: str


class Said(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress."""

    fraction: float | None
    message: str


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The value that the tool returned, as JSON; the last message."""

    content: bytes
    inverse: InverseCall | None = None


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reason why the tool returned nothing; the last message.

    `text` is that of a ToolError (TOLD), what JSON has no form for (NOT_JSON), the
    number of bytes (TOO_LARGE), or the type of an exception (CRASHED, BROKEN: when
    its module was imported).
    """

    kind: Literal["TOLD", "UNKNOWN", "NOT_JSON", "TOO_LARGE", "MEMORY", "CRASHED", "BROKEN"]
    text: str = ""
    frames: tuple[str, ...] = ()


ToProcess: TypeAlias = Call | Cancel | Answered
ToRegistry: TypeAlias = SecretAsked | CheckpointSaid | Said | Returned | Raised
Answer: TypeAlias = Returned | Raised

ERRORS: Final[Mapping[str, type[Exception]]] = {
    error.__name__: error for error in (ToolError, SecretNotFound, Superseded, ToolCancelled)
}
"""The errors that answer a question of a tool."""

_encoder: Final = msgspec.msgpack.Encoder()
_to_process: Final[msgspec.msgpack.Decoder[ToProcess]] = msgspec.msgpack.Decoder(ToProcess)
_to_registry: Final[msgspec.msgpack.Decoder[ToRegistry]] = msgspec.msgpack.Decoder(ToRegistry)


class GarbledMessage(Exception):
    """The bytes that came are no message: the tool wrote into the channel itself."""


def frame(message: ToProcess | ToRegistry) -> bytes:
    """Return a message with its length."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def receive(messages: BinaryIO) -> ToProcess | None:
    """Wait for the next message from the registry; None if there will be none."""
    count = int.from_bytes(messages.read(_LENGTH_BYTES), "big")
    body = messages.read(count)
    return _to_process.decode(body) if count and len(body) == count else None


async def read_message(reader: asyncio.StreamReader, bytes_max: int) -> ToRegistry | None:
    """Wait for the next message from a process; None if there will be none.

    Raises:
        GarbledMessage: it is over `bytes_max`, or no message.
    """
    try:
        count = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
        if count > bytes_max:
            raise GarbledMessage
        return _to_registry.decode(await reader.readexactly(count))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise GarbledMessage from None
