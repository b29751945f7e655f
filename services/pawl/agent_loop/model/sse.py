"""Decodes server-sent events.

The decoder follows "Parsing an event stream" in the HTML standard, as far as model servers require. It ignores event
names, ids and comments. `Answer` removes a byte order mark.
"""

from __future__ import annotations

from typing import Final

# Limit per event and per line.
EVENT_BYTES_MAX: Final = 4 * 1024 * 1024


class EventTooLargeError(Exception):
    """Raised when an event or a line exceeds EVENT_BYTES_MAX."""


class SseDecoder:
    """A decoder that returns the data of each event as soon as it is complete.

    The same bytes produce the same events, however they are split.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._after_cr = False
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that `chunk` completes, in order.

        Raises:
            EventTooLargeError: The decoder cannot continue.
        """
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
        self._buffer += chunk
        events: list[bytes] = []
        self._take_lines(events)
        if len(self._buffer) > EVENT_BYTES_MAX:
            raise EventTooLargeError
        return events

    def flush(self) -> bytes | None:
        """Return the data of an unfinished event at the end of the stream, if there is one.

        The standard would discard the event. This decoder returns it, because some servers omit the last empty line.

        Raises:
            EventTooLargeError: The event is too large.
        """
        events: list[bytes] = []
        self._buffer += b"\n\n"
        self._take_lines(events)
        return events[0] if events else None

    def _take_lines(self, events: list[bytes]) -> None:
        end = 1 + max(self._buffer.rfind(b"\n", self._scanned), self._buffer.rfind(b"\r", self._scanned))
        # A CR ends its line immediately; an LF right after it belongs to it.
        self._after_cr = 0 < end == len(self._buffer) and self._buffer.endswith(b"\r")
        lines = bytes(self._buffer[:end]).splitlines()
        del self._buffer[:end]
        self._scanned = len(self._buffer)
        for line in lines:
            if line.startswith(b"data:") or line == b"data":
                self._data.append(line[5:].removeprefix(b" "))
                self._data_bytes += len(line)
                if self._data_bytes > EVENT_BYTES_MAX:
                    raise EventTooLargeError
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._data_bytes = 0
