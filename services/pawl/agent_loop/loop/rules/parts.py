"""Parts of a user's message: their validation, and their conversion for the model."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import checks
from pawl.errors import InvalidField, TooLarge, UnsupportedPart

PARTS_MAX: Final = 32
# Total for all parts of a message: text, images and the text of documents.
BYTES_MAX: Final = 1024 * 1024
# Size of an image in a history: about two thousand tokens, regardless of its bytes.
IMAGE_SIZE_BYTES: Final = 6000
NAME_CHARACTERS_MAX: Final = 200
# The first bytes of an image, by type. The model server will find out whether the rest is valid.
_IMAGES: Final = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """An image. Without `data`, models no longer see the image, but the other fields still describe it."""

    data: bytes = b""
    media_type: str = ""
    size_bytes: int = 0
    sha256: str = ""


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A document of the user or the store, with its text at the time of the message."""

    document_name: str
    shared: bool = False
    text: str = ""
    size_bytes: int = 0
    sha256: str = ""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message. Exactly one field is not None."""

    text: str | None = None
    image: ImagePart | None = None
    file: FilePart | None = None


def checked(text: str, parts: Sequence[Part], *, takes_images: bool) -> tuple[Part, ...]:
    """Validate the parts of a message. Return `text` as a part, followed by these parts.

    Images get their media types. Documents do not have their text yet.

    Raises:
        InvalidField, TooLarge: A part is invalid. The error names the field.
        UnsupportedPart: The deployment's models do not accept images.
    """
    if len(parts) > PARTS_MAX:
        raise InvalidField(f"parts may have at most {PARTS_MAX} entries", field="parts")
    if text:
        checks.text(text, "text", bytes_max=checks.MESSAGE_BYTES_MAX)
    whole = [*([Part(text=text)] if text else []), *(_checked(part, takes_images=takes_images) for part in parts)]
    texts = sum(len(part.text.encode()) for part in whole if part.text is not None)
    if texts > checks.MESSAGE_BYTES_MAX:
        raise TooLarge(f"the text in parts must be at most {checks.MESSAGE_BYTES_MAX} bytes in total", field="parts")
    return within(whole)


def within(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Check the total size of parts. Return the parts.

    Raises:
        TooLarge
    """
    size_bytes = sum(map(_size_bytes, parts))
    if size_bytes > BYTES_MAX:
        message = f"parts must be at most {BYTES_MAX} bytes in total, got {size_bytes}"
        raise TooLarge(message, field="parts")
    return tuple(parts)


def with_text(file: FilePart, text: str) -> FilePart:
    data = text.encode()
    return replace(file, text=text, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def content(parts: Iterable[Part], *, takes_images: bool) -> str | list[dict[str, Any]]:
    """Return parts as the content of a chat-completions message. The content is plain text if all parts are text.

    Placeholders describe images that the model cannot see.
    """
    shown = [_content_part(part, takes_images=takes_images) for part in parts]
    if any(each["type"] != "text" for each in shown):
        return shown
    return "\n\n".join(each["text"] for each in shown)


def joined(contents: Sequence[str | Sequence[Mapping[str, Any]] | None]) -> str | list[Mapping[str, Any]] | None:
    """Join contents of chat-completions messages. The result is plain text if all contents are text."""
    texts = list(takewhile(lambda content: isinstance(content, str | None), contents))
    text = "\n\n".join(each for each in texts if isinstance(each, str) and each) or None
    if len(texts) == len(contents):
        return text
    whole = [part for content in (text, *contents[len(texts) :]) for part in _listed(content)]
    return whole[0]["text"] if [part["type"] for part in whole] == ["text"] else whole


def size_bytes(content: object) -> int:
    """Return the size of a message's content in a history. Each image counts as a fixed size."""
    if not isinstance(content, list | tuple):
        return len(msgspec.json.encode(content))
    return sum(
        IMAGE_SIZE_BYTES if part.get("type") == "image_url" else len(msgspec.json.encode(part)) for part in content
    )


def _checked(part: Part, *, takes_images: bool) -> Part:
    match part:
        case Part(text=str() as text):
            checks.text(text, "parts.text", bytes_max=checks.MESSAGE_BYTES_MAX)
            return Part(text=text)
        case Part(image=ImagePart() as image):
            return Part(image=_checked_image(image, takes_images=takes_images))
        case Part(file=FilePart() as file):
            if not 1 <= len(file.document_name) <= NAME_CHARACTERS_MAX:
                message = f"parts.file.document_name must have 1 to {NAME_CHARACTERS_MAX} characters"
                raise InvalidField(message, field="parts.file.document_name")
            return Part(file=FilePart(document_name=file.document_name, shared=file.shared))
        case _:
            message = "each part must be text, an image or a file"
            raise InvalidField(message, field="parts")


def _checked_image(image: ImagePart, *, takes_images: bool) -> ImagePart:
    if not takes_images:
        raise UnsupportedPart(
            "this deployment's models do not accept images: send text, or set PAWL_MODEL_INPUT", part="image"
        )
    if not image.data:
        raise InvalidField("parts.image.data is empty", field="parts.image.data")
    kind = next((kind for kind, pattern in _IMAGES.items() if pattern.match(image.data)), None)
    if kind is None:
        raise InvalidField("parts.image.data is not a PNG, JPEG, GIF or WebP image", field="parts.image.data")
    if image.media_type not in {"", kind}:
        message = f"parts.image.media_type is {image.media_type!r}, but the data is {kind}"
        raise InvalidField(message, field="parts.image.media_type")
    digest = hashlib.sha256(image.data).hexdigest()
    return ImagePart(data=image.data, media_type=kind, size_bytes=len(image.data), sha256=digest)


def _size_bytes(part: Part) -> int:
    if part.image is not None:
        return len(part.image.data)
    return len((part.file.text if part.file is not None else part.text or "").encode())


def _content_part(part: Part, *, takes_images: bool) -> dict[str, Any]:
    match part:
        case Part(image=ImagePart() as image):
            if image.data and takes_images:
                data = base64.b64encode(image.data).decode()
                return {"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}}
            why = "It is no longer shown" if takes_images else "This model does not accept images"
            return text_part(f"[An image was here ({image.media_type}, {image.size_bytes} bytes). {why}.]")
        case Part(file=FilePart() as file):
            return text_part(f"[File {file.document_name}, {file.size_bytes} bytes]\n{file.text}\n[End of file]")
        case _:
            return text_part(part.text or "")


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _listed(content: str | Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    if isinstance(content, str | None):
        return [text_part(content)] if content else []
    return list(content)
