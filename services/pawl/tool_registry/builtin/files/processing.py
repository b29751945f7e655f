"""Processes text and CSV files of any size in bounded memory. A restarted call continues from its checkpoint."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, Final

import msgspec

from pawl.tool_registry.builtin.files.staging import StagedFile
from pawl.tool_registry.builtin.files.tally import SAMPLE_CHARACTERS, Query, Tally
from pawl.tools.sdk.context import Superseded, ToolCancelled, ToolContext, ToolError

PIECE_BYTES: Final = 256 * 1024
# Maximum length of a line, and of a CSV row with line breaks in quotes.
ROW_BYTES_MAX: Final = 1024 * 1024
CHECKPOINT_BYTES: Final = 32 * 1024 * 1024
GROUPS_SHOWN: Final = 50
COLUMNS_SHOWN: Final = 100
COLUMNS_MAX: Final = 1000
_SEPARATORS: Final = ",;\t|"
_QUOTED: Final = re.compile('"[^"]*"?')
# Between pieces, other threads of the process can run.
_PAUSE_SECONDS: Final = 0.001


class Lines:
    """The lines of an open UTF-8 file from `offset`. `is_at_edge` is true if no line after `offset` has been read yet.

    `pending_bytes` counts the bytes read since it was last reset, accurate to within PIECE_BYTES.

    Raises:
        ToolError: A line or row is too long, or not UTF-8.
    """

    def __init__(self, handle: int, offset: int, on_piece: Callable[[int], None]) -> None:
        self._handle = handle
        self._on_piece = on_piece
        self.offset = offset
        self.is_at_edge = True
        self.pending_bytes = 0

    def __iter__(self) -> Iterator[str]:
        rest, position, is_at_end = b"", self.offset, False
        while not is_at_end:
            self._on_piece(position)
            piece = os.pread(self._handle, PIECE_BYTES, position)
            position, is_at_end = position + len(piece), not piece
            rest += piece
            end = len(rest) if is_at_end else rest.rfind(b"\n") + 1
            self.pending_bytes += len(piece)
            if self.pending_bytes > ROW_BYTES_MAX + PIECE_BYTES:
                raise ToolError(f"a line or row after byte {self.offset} is longer than {ROW_BYTES_MAX} bytes")
            if end:
                block, rest = rest[:end], rest[end:]
                yield from self._lines(block)

    def _lines(self, block: bytes) -> Iterator[str]:
        try:
            text = block.decode()
        except UnicodeDecodeError as error:
            raise ToolError(f"the file is not UTF-8 text: see byte {self.offset + error.start}") from None
        *others, last = io.StringIO(text, newline="\n")
        self.is_at_edge = False
        yield from others
        self.offset += len(block)
        self.is_at_edge = True
        yield last


class Processing:
    """One execution of a query on the open file `source`.

    The output is written to `staged`. If there is no output, `staged` contains the groups, which may be too large for a
    checkpoint.
    """

    def __init__(
        self, source: int, query: Query, context: ToolContext, staged: StagedFile | None, *, has_output: bool
    ) -> None:
        self._source = source
        self._query = query
        self._context = context
        self._staged = staged
        self._buffer = io.StringIO(newline="")
        self._separator = ","
        self._data_offset = 0
        self._saved_offset = 0
        found = os.fstat(source)
        self._size = found.st_size
        # A checkpoint is useless once the file has changed.
        self._version = [found.st_size, found.st_mtime_ns, found.st_ino]
        self.tally = Tally(query, self._header() if query.is_csv else [])
        self._writes_rows = has_output and not query.is_grouped

    def run(self) -> dict[str, Any]:
        """Process the file and return a summary. The output, if any, is complete in the staged file.

        Raises:
            ToolError: The file cannot be processed.
            ToolCancelled: The call was cancelled.
        """
        offset = self._resume()
        lines = Lines(self._source, offset, self._on_piece)
        # With "\n" as its line terminator, csv does not quote cells that contain "\r".
        target: Any = SimpleNamespace(write=lambda row: self._buffer.write(row[:-2] + "\n"))
        writer = csv.writer(target, delimiter=self._separator)
        if self._writes_rows and self._query.is_csv and offset == self._data_offset:
            writer.writerow(self.tally.columns)
        try:
            for row in self._rows(lines):
                lines.pending_bytes = 0
                chosen = self.tally.add(row) if row else None
                if self._writes_rows and chosen is not None:
                    if self._query.is_csv:
                        writer.writerow(chosen)
                    else:
                        self._buffer.write(f"{chosen[0]}\n")
                    if self._buffer.tell() >= PIECE_BYTES:
                        self._flush()
                if lines.is_at_edge and lines.offset - self._saved_offset >= CHECKPOINT_BYTES:
                    self._checkpoint(lines.offset)
        except csv.Error as error:
            raise ToolError(f"the CSV row after row {self.tally.rows} cannot be read: {error}") from None
        return self._summary(writer)

    def _header(self) -> list[str]:
        lines = iter(Lines(self._source, 0, lambda _: None))
        first = next(lines, "")
        self._separator = separator_of(first)
        used: list[str] = []

        def read() -> Iterator[str]:
            for line in chain([first], lines):
                used.append(line)
                yield line.removeprefix("\ufeff")

        try:
            header = next(csv.reader(read(), delimiter=self._separator), [])
        except csv.Error as error:
            raise ToolError(f"the CSV header cannot be read: {error}") from None
        self._data_offset = sum(len(line.encode()) for line in used)
        if len(header) > COLUMNS_MAX:
            raise ToolError(f"the file has {len(header)} columns, over the limit of {COLUMNS_MAX}")
        return header

    def _rows(self, lines: Lines) -> Iterator[Sequence[str]]:
        if self._query.is_csv:
            return csv.reader(lines, delimiter=self._separator)
        return ([line.removesuffix("\n").removesuffix("\r")] for line in lines)

    def _on_piece(self, position: int) -> None:
        if self._context.wait_cancelled(_PAUSE_SECONDS):
            raise ToolCancelled
        self._context.progress(position / self._size if self._size else None, f"{self.tally.rows} rows")

    def _resume(self) -> int:
        """Restore the last checkpoint and return its offset.

        Without a usable checkpoint, return the offset at which the data starts, after any CSV header.
        """
        saved: Any = self._context.last_checkpoint
        staged_bytes = self._staged.size if self._staged else 0
        is_usable = isinstance(saved, dict) and saved["version"] == self._version
        if not is_usable or staged_bytes < saved["output_bytes"] + saved["groups_bytes"]:
            if self._staged is not None:
                self._staged.truncate(0)
            return self._data_offset
        groups = []
        if self._staged is not None:
            if saved["groups_bytes"]:
                groups = msgspec.json.decode(self._staged.read(saved["output_bytes"], saved["groups_bytes"]))
            self._staged.truncate(saved["output_bytes"] + saved["groups_bytes"])
        self.tally.restore(saved, groups)
        self._saved_offset = saved["offset"]
        return self._saved_offset

    def _flush(self) -> None:
        if self._staged is not None:
            self._staged.write(self._buffer.getvalue().encode())
        self._buffer.seek(0)
        self._buffer.truncate()

    def _checkpoint(self, offset: int) -> None:
        """Save the progress. The staged file contains the earlier groups until the new ones are saved."""
        written, groups = 0, b""
        if self._staged is not None:
            self._flush()
            written = self._staged.size
            if self._query.is_grouped:
                groups = msgspec.json.encode(self.tally.saved_groups())
                self._staged.write(groups)
            self._staged.sync()
        saved = {"version": self._version, "offset": offset, "output_bytes": written, "groups_bytes": len(groups)}
        self._context.checkpoint(saved | self.tally.saved_counts())
        self._saved_offset = offset

    def _summary(self, writer: Any) -> dict[str, Any]:
        tally, query = self.tally, self._query
        shown: dict[str, Any] = {"bytes": self._size, "rows" if query.is_csv else "lines": tally.rows}
        shown["matched"] = tally.matched
        if query.is_grouped:
            columns, groups = tally.groups()
            shown |= {
                "group_count": len(groups),
                "columns": columns,
                "groups": [_short(group) for group in groups[:GROUPS_SHOWN]],
            }
            if self._staged is not None:
                if self._saved_offset:
                    # From here on, the staged file no longer contains the groups of the last checkpoint.
                    self._context.checkpoint(None)
                self._staged.truncate(0)
                writer.writerow(columns)
                writer.writerows(groups)
        else:
            shown |= {"columns": _short(tally.columns)} if query.is_csv else {}
            shown["sample"] = tally.sample
        if self._staged is not None:
            self._flush()
            self._staged.sync()
        return shown


def separator_of(header: str) -> str:
    """Return the separator of a CSV file whose first line is `header`."""
    return max(_SEPARATORS, key=_QUOTED.sub("", header).count)


def _short(cells: Sequence[Any]) -> list[Any]:
    return [cell[:SAMPLE_CHARACTERS] if isinstance(cell, str) else cell for cell in cells[:COLUMNS_SHOWN]]


def keeps_staged(error: BaseException | None, context: ToolContext) -> bool:
    """Return whether a later execution will need the staged file of an execution that ended with this error."""
    return isinstance(error, Superseded) or (isinstance(error, ToolCancelled) and context.will_restart)
