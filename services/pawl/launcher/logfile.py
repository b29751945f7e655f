"""Log files. Processes write to them directly, and the launcher rotates them by size."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

SIZE_MAX_BYTES = 10 * 1024 * 1024
GENERATIONS = 3
_TAIL_BYTES = 8192


class LogFile:
    """The log of one process, which appends to it directly, so that no line is lost when the launcher dies.

    A rotation copies and truncates the file. A line written at that moment may be lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def open(self) -> BinaryIO:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._start = os.fstat(descriptor).st_size
        return os.fdopen(descriptor, "wb")

    def rotate(self) -> None:
        """Move the content to `.1` (and `.1` to `.2`, and so on) if the file is too large."""
        if not self.path.exists() or self.path.stat().st_size <= SIZE_MAX_BYTES:
            return
        for generation in range(GENERATIONS - 1, 0, -1):
            older = self.path.with_name(f"{self.path.name}.{generation}")
            if older.exists():
                older.replace(self.path.with_name(f"{self.path.name}.{generation + 1}"))
        shutil.copy2(self.path, self.path.with_name(f"{self.path.name}.1"))
        os.truncate(self.path, 0)

    def mark(self) -> None:
        """Make `events` ignore the lines written so far."""
        self._start = self.path.stat().st_size

    def events(self, event: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON log lines with this event that the newest process wrote, or those since `mark`."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            for line in file:
                if event.encode() in line:
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield msgspec.json.decode(line, type=dict[str, Any])

    def last_line(self) -> str:
        """Return the last line. If it is JSON, return only its message. If the log is empty, return a note."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        if not lines:
            return f"it did not write anything to {self.path}"
        try:
            fields = msgspec.json.decode(lines[-1], type=dict[str, Any])
        except msgspec.MsgspecError:
            return lines[-1]
        return str(fields.get("error") or fields.get("event") or lines[-1])

    def _tail(self) -> str:
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
