"""What a terminal shows and takes: lines, tables, text broken between words, and the keyboard."""

from __future__ import annotations

import asyncio
import queue
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Final, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from pawl.chassis.process.tasks import shield

_GAP: Final = 2
_LAST_WIDTH_MIN: Final = 8
_PART: Final = re.compile(r"\n|[^\S\n]+|\S+")
_HELD_CELLS_MAX: Final = 30
"""The longest word that is kept whole. A longer one is a link, or text in a script without blanks."""


def say(console: Console, lines: str | Iterable[str], style: str = "") -> None:
    """Print lines as they are; the terminal breaks those that are too long, so that they can be copied."""
    for line in [lines] if isinstance(lines, str) else lines:
        console.print(line, style=style, markup=False, soft_wrap=True)


def show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows: a table on a terminal, lines with tabs elsewhere, for other programs.

    On a terminal that is too narrow each cell has a line of its own, so that no id is cut.
    """
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    widths = (max(map(cell_len, column)) for column in list(zip(headings, *rows, strict=True))[:-1])
    if rows and sum(width + _GAP for width in widths) + _LAST_WIDTH_MIN > console.width:
        for row in rows:
            lines = (f"  {heading}: {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell)
            say(console, [row[0], *lines])
        return
    table = Table(box=None, pad_edge=False, expand=True)
    for heading in headings[:-1]:
        table.add_column(heading, no_wrap=True)
    table.add_column(headings[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table)


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


class LineReader:
    """Reads a line only when asked, so that an editor can have the keyboard in between.

    Its thread ends with the process: a read of a terminal cannot be cancelled.
    """

    def __init__(self, source: TextIO | None = None) -> None:
        self._source = source or sys.stdin
        self._wanted: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[str | None]]] = (
            queue.SimpleQueue()
        )
        self._pending: asyncio.Future[str | None] | None = None
        threading.Thread(target=self._read, name="keyboard", daemon=True).start()

    async def line(self) -> str | None:
        """Return the next line without its end; None at the end of the input.

        Safe to cancel: the line that was asked for is given to the next caller.
        """
        if self._pending is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.create_future()
            self._wanted.put((loop, self._pending))
        line = await shield(self._pending)
        self._pending = None
        return line

    def _read(self) -> None:
        while True:
            loop, future = self._wanted.get()
            try:
                text = self._source.readline()
            except (OSError, ValueError):
                text = ""
            line = text.rstrip("\r\n") if text else None
            try:
                loop.call_soon_threadsafe(_resolve, future, line)
            except RuntimeError:
                return  # The program is over.


def _resolve(future: asyncio.Future[str | None], line: str | None) -> None:
    if not future.done():
        future.set_result(line)
