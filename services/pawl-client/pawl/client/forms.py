"""Creates message parts and handles structured answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pawl.chassis import strict_json
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import message_pb2, run_pb2

SCHEMA_BYTES_MAX: Final = 64 * 1024
# Limit for one image, and for all parts of a message in total.
IMAGE_BYTES_MAX: Final = 1024 * 1024
_NUMBER_MAX: Final = 2**63 - 1


def image(content: bytes | str | Path) -> message_pb2.Part:
    """Return a message part for an image, from bytes or a file.

    Raises:
        OSError: The file cannot be read.
        TooLarge: The image is over 1 MiB.
    """
    data = content if isinstance(content, bytes) else read_file(Path(content), IMAGE_BYTES_MAX + 1)
    if len(data) > IMAGE_BYTES_MAX:
        raise TooLarge(f"an image must be at most {IMAGE_BYTES_MAX} bytes. Make it smaller")
    return message_pb2.Part(image=message_pb2.ImagePart(data=data))


def file(document_name: str, *, shared: bool = False) -> message_pb2.Part:
    """Return a message part for one of your documents or, with `shared`, one of the store's documents.

    The model receives the document's text.
    """
    return message_pb2.Part(file=message_pb2.FilePart(document_name=document_name, shared=shared))


def parts_of(given: Sequence[object] | message_pb2.Part) -> list[message_pb2.Part]:
    """Convert strings and parts to message parts.

    Raises:
        InvalidField: An item is neither a string nor a part.
    """
    parts = []
    for each in [given] if isinstance(given, str | message_pb2.Part) else given:
        part = message_pb2.Part(text=each) if isinstance(each, str) else each
        if not isinstance(part, message_pb2.Part):
            raise InvalidField("a message part must be text, image(...) or file(...)", field="parts")
        parts.append(part)
    return parts


def natural(number: object, field: str) -> int:
    """Return `number` if it is an integer between 0 and 2**63 - 1.

    Raises:
        InvalidField: `number` is not such an integer.
    """
    if isinstance(number, int) and 0 <= number <= _NUMBER_MAX:
        return number
    raise InvalidField(f"{field} must be an integer between 0 and {_NUMBER_MAX}", field=field)


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return the first `bytes_max` bytes of a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as opened:
        return opened.read(bytes_max)


def form(schema: Mapping[str, Any] | bytes, *, name: str = "", strict: bool = False) -> run_pb2.ResponseFormat:
    """Return a response format with a JSON Schema, for `RunOptions(response_format=form(schema))`.

    With `strict`, the model server enforces the schema. Some servers then support only a subset of JSON Schema.
    """
    content = schema if isinstance(schema, bytes) else strict_json.dumps_canonical(dict(schema))
    return run_pb2.ResponseFormat(name=name, schema_json=content, strict=strict)


def output(run: run_pb2.Run) -> Any:
    """Return a run's structured answer as a value.

    Return None if the run has no answer, for example because it is active or the model refused (see `output_text`).
    """
    return msgspec.json.decode(run.output_json) if run.output_json else None
