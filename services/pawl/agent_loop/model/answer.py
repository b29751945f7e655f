"""Parses a model's answer as its bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pawl.agent_loop.model import chunk, failure
from pawl.agent_loop.model.request import (
    Finished,
    ModelError,
    Piece,
    Problem,
    TextPiece,
    UsageReport,
)
from pawl.agent_loop.model.sse import EventTooLargeError, SseDecoder

# Limit per answer.
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024

# Line prefixes of an event stream that carry no data of their own.
_OF_A_STREAM: Final = (b":", b"event:", b"id:", b"retry:", b"data:")


def _joined(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join consecutive texts, because each piece has a fixed cost. Nothing that precedes an error is lost."""
    texts: list[str] = []
    try:
        for piece in pieces:
            if isinstance(piece, TextPiece):
                texts.append(piece.text)
                continue
            if texts:
                yield TextPiece(text="".join(texts))
                texts.clear()
            yield piece
    except ModelError:
        if texts:
            yield TextPiece(text="".join(texts))
        raise
    if texts:
        yield TextPiece(text="".join(texts))


class Answer:
    """Parses an event stream or a single JSON object into pieces.

    `finished` means that the model has sent a finish reason, so the answer is complete even if the connection breaks
    now. `done` means that nothing more will arrive. A body without events, such as a proxy's error page or plain text,
    becomes part of the error message.
    """

    def __init__(self) -> None:
        self._events = SseDecoder()
        self._start: bytes | None = b""
        self._json: list[bytes] | None = None
        self._bytes = 0
        self._has_event = False
        self._lead = b""
        self._has_output = False
        self._finish_reason: str | None = None
        self.done = False

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Yield the pieces that `data` completes, including those before a fault. Consume all of them.

        Raises:
            ModelError: The data is invalid or reports an error.
        """
        self._bytes += len(data)
        if self._bytes > ANSWER_BYTES_MAX:
            raise ModelError(failure.TOO_LARGE)
        if self._start is not None:
            # A server that does not stream sends one object. Its content type is not reliable.
            self._start += data
            text = self._start.lstrip(b"\xef\xbb\xbf \t\r\n")
            if not text:
                return
            self._json = [] if text.startswith(b"{") else None
            data, self._start = text, None
        if self._json is not None:
            self._json.append(data)
            return
        if not self._has_event and len(self._lead) < failure.READ_BYTES_MAX:
            self._lead += data[: failure.READ_BYTES_MAX]
        try:
            events = self._events.feed(data)
        except EventTooLargeError:
            raise ModelError(failure.TOO_LARGE) from None
        yield from _joined(piece for event in events for piece in self._take(event))

    def end(self) -> list[Piece]:
        """Return the remaining pieces at the end of the data. The last one is `Finished`.

        Raises:
            ModelError: The answer is incomplete or was withheld.
        """
        pieces = self._last_pieces()
        if self._finish_reason is None and not (self.done and self._has_output):
            raise ModelError(failure.TRUNCATED if self._has_output else self._nothing())
        if self._finish_reason == "content_filter":
            raise ModelError(failure.CONTENT_FILTER)
        if self._finish_reason == "error":
            raise ModelError(failure.reported({}))
        return [*pieces, Finished(reason=self._finish_reason or "")]

    def _nothing(self) -> Problem:
        lines = [line for line in self._lead.splitlines() if line.strip() and not line.startswith(_OF_A_STREAM)]
        return failure.garbled(b"\n".join(lines)) if lines and not self._has_event else failure.EMPTY

    def _last_pieces(self) -> list[Piece]:
        if self._json is not None:
            return self._take(b"".join(self._json), whole=True)
        try:
            event = None if self.done else self._events.flush()
            return [] if event is None else self._take(event)
        except (EventTooLargeError, ModelError):
            raise ModelError(failure.TRUNCATED) from None

    def _take(self, event: bytes, *, whole: bool = False) -> list[Piece]:
        text = event.strip()
        self._has_event = True
        if self.done or not text:
            return []
        if text == b"[DONE]":
            self.done = True
            return []
        pieces: list[Piece] = []
        for piece in chunk.pieces(text, whole=whole):
            if isinstance(piece, Finished):
                self._finish_reason = self._finish_reason or piece.reason
            else:
                self._has_output = self._has_output or not isinstance(piece, UsageReport)
                pieces.append(piece)
        return pieces
