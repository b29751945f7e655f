"""Server-sent events from bytes, however the bytes were cut.

Follows "Parsing an event stream" of the HTML standard, for what a model server
sends: event names and ids are read over, a comment is nothing but a life sign.
"""

from __future__ import annotations

import re
from typing import Final

EVENT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Most bytes of one event, or of one line."""

_BOM: Final = b"\xef\xbb\xbf"
_JOINED_BYTES_MAX: Final = 64 * 1024
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class EventTooLargeError(Exception):
    """An event, or a line, is over EVENT_BYTES_MAX."""


class SseDecoder:
    """Gives the data of each event as soon as the event is whole.

    The same bytes give the same events, wherever they are cut.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._started = False
        self._after_cr = False
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that `chunk` completes, in order.

        Raises:
            EventTooLargeError: the decoder cannot go on.
        """
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        waiting = len(self._buffer)
        self._buffer += chunk
        if not self._started and not self._start():
            return []
        events: list[bytes] = []
        # Nearly always there are whole events, and lines end in LF: the rest of the last read is small and joined anew.
        if self._data or waiting > _JOINED_BYTES_MAX or b"\r" in self._buffer:
            self._take_lines(events)
        else:
            self._take_blocks(events)
        if len(self._buffer) > EVENT_BYTES_MAX:
            raise EventTooLargeError
        return events

    def flush(self) -> bytes | None:
        """Return the data of the event that the end of the stream left open, if there is one.

        The standard drops it; servers that forget the last empty line are why it is kept.

        Raises:
            EventTooLargeError: that event is too large.
        """
        events: list[bytes] = []
        self._buffer += b"\n\n"
        self._take_lines(events)
        return events[0] if events else None

    def _take_blocks(self, events: list[bytes]) -> None:
        *blocks, rest = bytes(self._buffer).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data: ") and b"\n" not in block and len(block) <= EVENT_BYTES_MAX:
                events.append(block[6:])
                continue
            for line in block.split(b"\n"):
                self._take_line(line, events)
            self._take_line(b"", events)
        self._buffer = bytearray(rest)
        self._scanned = 0
        self._after_cr = False

    def _take_lines(self, events: list[bytes]) -> None:
        start = 0
        for line_end, next_start in [match.span() for match in _LINE_END.finditer(self._buffer, self._scanned)]:
            self._take_line(bytes(self._buffer[start:line_end]), events)
            start = next_start
        # A CR ends its line at once; the LF that may follow belongs to it.
        self._after_cr = start == len(self._buffer) and self._buffer.endswith(b"\r")
        del self._buffer[:start]
        self._scanned = len(self._buffer)

    def _start(self) -> bool:
        """Drop a byte order mark; return False while there may be half of one."""
        if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
            return False
        if self._buffer.startswith(_BOM):
            del self._buffer[: len(_BOM)]
        self._started = True
        return True

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._data_bytes = 0
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
            if self._data_bytes > EVENT_BYTES_MAX:
                raise EventTooLargeError
