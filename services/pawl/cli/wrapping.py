"""Text that comes in pieces, broken between words at the width of the screen."""

from __future__ import annotations

import re
from typing import Final

from rich.cells import cell_len

_PART: Final = re.compile(r"\n|[^\S\n]+|\S+")
_HELD_CELLS_MAX: Final = 30
"""The longest word: what goes on for longer without a blank is a link, or a script that has no blanks."""


class WordWrap:
    """Takes pieces of a text and gives what is to be printed of it, with line breaks before words that do not fit.

    The last word is kept back until it is whole, and blanks until a word follows them.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""

    def take(self, text: str) -> str:
        """Return what can be printed after the next piece."""
        parts = _PART.findall(self._word + text)
        self._word = ""
        if parts and not parts[-1].isspace() and cell_len(parts[-1]) < _HELD_CELLS_MAX:
            self._word = parts.pop()
        return "".join(map(self._placed, parts))

    def flush(self) -> str:
        """Return what was kept back; the next piece begins a new line."""
        word, self._word = self._word, ""
        rest = self._placed(word) if word else ""
        self._column, self._blanks = 0, ""
        return rest

    def _placed(self, part: str) -> str:
        if part == "\n":
            self._column, self._blanks = 0, ""
            return part
        if part.isspace():
            self._blanks += part.expandtabs(4)
            return ""
        before, self._blanks = self._blanks, ""
        cells = cell_len(before) + cell_len(part)
        if self._column and self._column + cells > self._width:
            before, cells = "\n", cell_len(part)
            self._column = 0
        self._column += cells
        if self._column > self._width:
            self._column %= self._width
        return before + part
