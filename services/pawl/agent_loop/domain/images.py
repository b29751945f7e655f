"""The frame of an image, read without decoding a pixel: its type, its size, and whether it is whole.

A model server refuses a request with an image that it cannot read, so what cannot be one is refused at the door. Each
reader goes over the bytes once. What stands behind the end of an image is left alone, as decoders do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

SIDE_PIXELS_MAX: Final = 16_384
"""The most pixels of a side: no model server takes more."""
_PIECES_MAX: Final = 10_000
"""The most chunks or segments that are looked at: encoders write some hundreds into a megabyte."""

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_HEAD_BYTES: Final = 13
_PNG_CRITICAL: Final = 0x20  # Not set in the first letter: decoders refuse an image whose chunk is damaged.
_JPEG: Final = b"\xff\xd8"
_JPEG_BARE: Final = frozenset({0x01, *range(0xD0, 0xD8)})
_JPEG_ELSEWHERE: Final = frozenset({0x00, 0xD8, 0xD9})
_JPEG_SIZES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SCAN: Final = 0xDA
_JPEG_FILL: Final = 0xFF
_JPEG_END: Final = b"\xff\xd9"
_GIF: Final = (b"GIF87a", b"GIF89a")
_GIF_COLOURS: Final = 0x80
_GIF_IMAGE, _GIF_EXTENSION, _GIF_END = 0x2C, 0x21, 0x3B
_WEBP_HEAD_BYTES: Final = 12
_WEBP_LOSSY_START: Final = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_START: Final = 0x2F
_SIDE_14_BITS: Final = 0x3FFF

Size: TypeAlias = tuple[int, int]


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image that is whole: its type, and its size in pixels."""

    media_type: str
    width: int
    height: int


class BadImage(ValueError):
    """The bytes are no image that a model server could read. The text says why, behind "parts.image.data "."""


def read(data: bytes) -> Image:
    """Return what image these bytes are.

    Raises:
        BadImage: they are none, or it is cut off, damaged, or of a size that no model server takes.
    """
    media_type, size_of = _format(data)
    try:
        width, height = size_of(data)
    except (IndexError, ValueError):
        raise BadImage(f"begins like {media_type}, and is cut off or damaged") from None
    if not (1 <= width <= SIDE_PIXELS_MAX and 1 <= height <= SIDE_PIXELS_MAX):
        raise BadImage(f"is {width} x {height} pixels: an image has 1 to {SIDE_PIXELS_MAX} a side")
    return Image(media_type=media_type, width=width, height=height)


def _format(data: bytes) -> tuple[str, Callable[[bytes], Size]]:
    if data.startswith(_PNG):
        return "image/png", _png
    if data.startswith(_JPEG + b"\xff"):
        return "image/jpeg", _jpeg
    if data.startswith(_GIF):
        return "image/gif", _gif
    if data[:4] == b"RIFF" and data[8:_WEBP_HEAD_BYTES] == b"WEBP":
        return "image/webp", _webp
    raise BadImage("is no PNG, JPEG, GIF or WebP image")


def _require(holds: bool) -> None:  # noqa: FBT001  # what is required
    if not holds:
        raise ValueError


def _number(data: bytes, at: int, size_bytes: int, *, little: bool = False) -> int:
    found = data[at : at + size_bytes]
    _require(len(found) == size_bytes)
    return int.from_bytes(found, "little" if little else "big")


def _png(data: bytes) -> Size:
    """Chunks: length, name, content, CRC. IHDR is the first, IDAT is there, IEND ends the image (PNG, 5.3 and 5.6)."""
    size: Size | None = None
    at, has_pixels = len(_PNG), False
    for _ in range(_PIECES_MAX):
        length, name = _number(data, at, 4), data[at + 4 : at + 8]
        end = at + 8 + length
        crc = _number(data, end, 4)
        _require(bool(name[0] & _PNG_CRITICAL) or zlib.crc32(memoryview(data)[at + 4 : end]) == crc)
        if size is None:
            _require(name == b"IHDR" and length == _PNG_HEAD_BYTES)
            size = _number(data, at + 8, 4), _number(data, at + 12, 4)
        has_pixels = has_pixels or (name == b"IDAT" and length > 0)
        if name == b"IEND":
            _require(has_pixels)
            return size
        at = end + 4
    raise ValueError


def _jpeg(data: bytes) -> Size:
    """Segments up to the first scan, one of which has the size; the scans end with EOI (T.81, B.1)."""
    size: Size | None = None
    at = len(_JPEG)
    for _ in range(_PIECES_MAX):
        _require(data[at] == _JPEG_FILL)
        while data[at] == _JPEG_FILL:
            at += 1
        marker, at = data[at], at + 1
        if marker in _JPEG_BARE:
            continue
        _require(marker not in _JPEG_ELSEWHERE)
        length = _number(data, at, 2)
        _require(length >= 2 and at + length <= len(data))  # noqa: PLR2004  # itself
        if marker in _JPEG_SIZES:
            size = _number(data, at + 5, 2), _number(data, at + 3, 2)
        if marker == _JPEG_SCAN:
            _require(size is not None and data.find(_JPEG_END, at + length) > at + length)
            return size or (0, 0)
        at += length
    raise ValueError


def _gif(data: bytes) -> Size:
    """A screen with its size, then blocks up to the trailer, one of which is an image (GIF89a, 17 to 27)."""
    size = _number(data, 6, 2, little=True), _number(data, 8, 2, little=True)
    at, has_pixels = 13 + _gif_colours(data[10]), False
    while data[at] != _GIF_END:
        if data[at] == _GIF_IMAGE:
            at += 10 + _gif_colours(data[at + 9]) + 1
            has_pixels = has_pixels or data[at] > 0
        else:
            _require(data[at] == _GIF_EXTENSION)
            at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    _require(has_pixels)
    return size


def _gif_colours(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & _GIF_COLOURS else 0


def _webp(data: bytes) -> Size:
    """Chunks within the size that RIFF says; the first has the size, one the pixels (RFC 9649, 2)."""
    end = 8 + _number(data, 4, 4, little=True)
    _require(end <= len(data))
    at, size, has_pixels = _WEBP_HEAD_BYTES, None, False
    while at < end:
        name, length = data[at : at + 4], _number(data, at + 4, 4, little=True)
        at += 8
        _require(at + length <= end)
        if size is None:
            size = _webp_size(name, data[at : at + length])
        has_pixels = has_pixels or name in {b"VP8 ", b"VP8L", b"ANMF"}
        at += length + length % 2
    _require(has_pixels)
    return size or (0, 0)


def _webp_size(name: bytes, chunk: bytes) -> Size:
    match name:
        case b"VP8 ":
            _require(chunk[3:6] == _WEBP_LOSSY_START)
            return _number(chunk, 6, 2, little=True) & _SIDE_14_BITS, _number(chunk, 8, 2, little=True) & _SIDE_14_BITS
        case b"VP8L":
            _require(chunk[0] == _WEBP_LOSSLESS_START)
            bits = _number(chunk, 1, 4, little=True)
            return (bits & _SIDE_14_BITS) + 1, (bits >> 14 & _SIDE_14_BITS) + 1
        case b"VP8X":
            return _number(chunk, 4, 3, little=True) + 1, _number(chunk, 7, 3, little=True) + 1
        case _:
            raise ValueError
