"""Messages between the registry and a call's process. A message consists of a four-byte length and MessagePack data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, Literal, TypeAlias

import msgspec

from pawl.tool_registry.rules.execution import InverseCall
from pawl.tools.sdk.context import SecretNotFound, Superseded, ToolCancelled, ToolError

_LENGTH_BYTES: Final = 4


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to run a call. It is the first message, and is sent only once."""

    import_name: str
    # The folder of tools that contains the module. Empty for an installed module.
    folder: str
    tool_name: str
    arguments: dict[str, Any]
    memory_bytes: int
    cpu_seconds: int
    content_bytes_max: int
    # The public fields of the tool's context.
    context: dict[str, Any]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """A request to cancel the call."""


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to the oldest open request: a secret, or the confirmation that a checkpoint was saved.

    On failure, `error` names one of ERRORS.
    """

    value: str = ""
    error: str = ""
    text: str = ""


class SaveCheckpoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to save a checkpoint. `content` is JSON."""

    content: bytes


class GetSecret(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    name: str


class ReportProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    fraction: float | None
    message: str


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The value that the tool returned, as JSON. This is always the last message."""

    content: bytes
    inverse: InverseCall | None = None


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reason why the tool did not return a value. This is always the last message.

    `text` depends on `kind`: the text of a ToolError (TOLD), the reason why the value is not JSON (NOT_JSON), the
    number of bytes (TOO_LARGE), or the exception type (CRASHED, or BROKEN if importing the module failed).
    """

    kind: Literal["TOLD", "UNKNOWN", "NOT_JSON", "TOO_LARGE", "MEMORY", "CRASHED", "BROKEN"]
    text: str = ""
    frames: tuple[str, ...] = ()


ToProcess: TypeAlias = Call | Cancel | Answered
ToRegistry: TypeAlias = GetSecret | SaveCheckpoint | ReportProgress | Returned | Raised
Answer: TypeAlias = Returned | Raised

# Errors that can answer a tool's request.
ERRORS: Final[Mapping[str, type[Exception]]] = {
    error.__name__: error for error in (ToolError, SecretNotFound, Superseded, ToolCancelled)
}

_encoder: Final = msgspec.msgpack.Encoder()
_to_process: Final[msgspec.msgpack.Decoder[ToProcess]] = msgspec.msgpack.Decoder(ToProcess)
_to_registry: Final[msgspec.msgpack.Decoder[ToRegistry]] = msgspec.msgpack.Decoder(ToRegistry)


class GarbledMessage(Exception):
    """Raised when received bytes are not a message, which means that the tool wrote to the channel."""


def frame(message: ToProcess | ToRegistry) -> bytes:
    """Return a message with its length prefix."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def receive(messages: BinaryIO) -> ToProcess | None:
    """Wait for the next message from the registry. Return None at the end of the input."""
    count = int.from_bytes(messages.read(_LENGTH_BYTES), "big")
    body = messages.read(count)
    return _to_process.decode(body) if count and len(body) == count else None


async def read_message(reader: asyncio.StreamReader, bytes_max: int) -> ToRegistry | None:
    """Wait for the next message from a process. Return None at the end of the input.

    Raises:
        GarbledMessage: The data exceeds `bytes_max` or is not a message.
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
