"""Slices of long texts, for tools that read them in pieces."""

from __future__ import annotations

from typing import Any, Final

BYTES_MAX: Final = 40_000
BYTES_DEFAULT: Final = 20_000
_CHARACTER_BYTES_MAX: Final = 4
_CONTINUES: Final = 0x80


def slice_of(content: bytes, offset: int, length: int) -> dict[str, Any]:
    """Return about `length` bytes of UTF-8 from `offset`, and the next offset, which is None at the end.

    Slices never split a character.
    """
    start, end = _boundary(content, offset), _boundary(content, offset + length)
    if end <= start:
        end = _boundary(content, start + _CHARACTER_BYTES_MAX)
    return {
        "offset": start,
        "total_bytes": len(content),
        "text": content[start:end].decode(),
        "next_offset": end if end < len(content) else None,
    }


def _boundary(content: bytes, position: int) -> int:
    position = min(position, len(content))
    while position < len(content) and content[position] & 0xC0 == _CONTINUES:
        position -= 1
    return position
