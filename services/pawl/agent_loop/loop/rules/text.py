"""Sanitizes text from external sources for storage and transport."""

from __future__ import annotations

import re
from typing import Final

_NAME_CHARACTERS_MAX: Final = 64
_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]+")
_AFTER_A_NAME: Final = re.compile(r"[<({\s]")
_DOTTED: Final = re.compile(r"(?=.{3,63}\Z)[a-zA-Z0-9_-]+\.[a-zA-Z0-9_-]+", re.ASCII)


def tool_name(text: str) -> str:
    """Convert `text` to a valid tool name: ^[a-zA-Z0-9_-]{1,64}$, or up to 63 characters with one dot inside."""
    if _DOTTED.fullmatch(text.strip()):
        return text.strip()
    return _NOT_IN_A_NAME.sub("_", text.strip())[:_NAME_CHARACTERS_MAX] or "unnamed"


def bare_name(name: str) -> str:
    """Return a tool's name without decorations that some models add: `functions.x`, `x()`, `x<|channel|>json`."""
    head = _AFTER_A_NAME.split(name.strip().lstrip("<|"), maxsplit=1)[0]
    return head.rpartition(".")[2].rpartition(":")[2]


def cut_bytes(data: bytes, bytes_max: int) -> str:
    """Return the start of UTF-8 text, at most `bytes_max` bytes long and without a partial character at the end."""
    return data[:bytes_max].decode(errors="ignore")
