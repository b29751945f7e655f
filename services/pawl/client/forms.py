"""Messages with more than a text, and answers in a form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from pawl.chassis import strict_json
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import message_pb2, run_pb2

SCHEMA_BYTES_MAX: Final = 64 * 1024
"""Most bytes of a schema."""
IMAGE_BYTES_MAX: Final = 1024 * 1024
"""Most bytes of an image, and of all parts of a message together."""
_NUMBER_MAX: Final = 2**63 - 1


def image(content: bytes | str | Path) -> message_pb2.Part:
    """Return an image as a part of a message: its bytes, or the file in which they are.

    Raises:
        OSError: the file cannot be read.
        TooLarge: it is over 1 MiB.
    """
    data = content if isinstance(content, bytes) else read_file(Path(content), IMAGE_BYTES_MAX + 1)
    if len(data) > IMAGE_BYTES_MAX:
        raise TooLarge(f"an image has at most {IMAGE_BYTES_MAX} bytes. Make it smaller")
    return message_pb2.Part(image=message_pb2.ImagePart(data=data))


def file(document_name: str, *, shared: bool = False) -> message_pb2.Part:
    """Return a document as a part of a message, yours or with `shared` the store's: the model is told its text."""
    return message_pb2.Part(file=message_pb2.FilePart(document_name=document_name, shared=shared))


def parts_of(given: Sequence[object] | message_pb2.Part) -> list[message_pb2.Part]:
    """Return parts of a message as the contract has them: a text is a part by itself.

    Raises:
        InvalidField: one is neither a text nor a part.
    """
    parts = []
    for each in [given] if isinstance(given, str | message_pb2.Part) else given:
        part = message_pb2.Part(text=each) if isinstance(each, str) else each
        if not isinstance(part, message_pb2.Part):
            raise InvalidField("a part of a message is a text, image(...) or file(...)", field="parts")
        parts.append(part)
    return parts


def natural(number: object, field: str) -> int:
    """Return a number that is 0 or more, and one that the contract has room for.

    Raises:
        InvalidField: it is none.
    """
    if isinstance(number, int) and 0 <= number <= _NUMBER_MAX:
        return number
    raise InvalidField(f"{field}: a whole number from 0 to {_NUMBER_MAX}", field=field)


def read_file(path: Path, bytes_max: int) -> bytes:
    """Return the first `bytes_max` bytes of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as opened:
        return opened.read(bytes_max)


def form(schema: Mapping[str, Any] | bytes, *, name: str = "", strict: bool = False) -> run_pb2.ResponseFormat:
    """Return the form of an answer that fits a JSON Schema, for `RunOptions(response_format=form(schema))`.

    With `strict` the model server is asked to hold the model to it, for which some take a part of JSON Schema only.
    """
    content = schema if isinstance(schema, bytes) else strict_json.dumps_canonical(dict(schema))
    return run_pb2.ResponseFormat(name=name, schema_json=content, strict=strict)


def output(run: run_pb2.Run) -> Any:
    """Return the answer of a run that was asked for one in a form, as a value; None if it gave none.

    That is so while the run goes on, when it failed, and when the model refused (`output_text` has its words).
    """
    return msgspec.json.decode(run.output_json) if run.output_json else None
