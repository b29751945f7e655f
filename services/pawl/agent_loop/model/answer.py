"""The state of a model's answer while its bytes arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from pawl.agent_loop.model import chunk, failure, words
from pawl.agent_loop.model.request import (
    CallPiece,
    Finished,
    ModelError,
    Piece,
    Problem,
    ReasoningPiece,
    RefusalPiece,
    TextPiece,
    UsageReport,
)
from pawl.agent_loop.model.sse import EventTooLargeError, SseDecoder
from pawl.chassis.strict_json import storable

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes of one answer."""

# What a line of a stream of events begins with that says nothing.
_OF_A_STREAM: Final = (b":", b"event:", b"id:", b"retry:", b"data:")
_REPLACEMENT: Final = "\ufffd"

_Text: TypeAlias = tuple[type[TextPiece | ReasoningPiece | RefusalPiece | CallPiece], int | None]
"""The kind of a text, and the index of the call whose arguments it is."""


class Answer:
    """Bytes in, pieces out: a stream of events, or one JSON object.

    `finished`: the model gave a finish reason, so nothing of the answer is
    missing if the connection ends now. `done`: nothing more will come. A body
    without any event is kept for what it says: a page of a proxy, or plain text.
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
        self._halves: dict[_Text, str] = {}
        self.done = False

    @property
    def finished(self) -> bool:
        """True if the model said that the answer is complete."""
        return self._finish_reason is not None

    def feed(self, data: bytes) -> Iterator[Piece]:
        """Give the pieces that `data` completes, also those before a fault in it. Take them all.

        Raises:
            ModelError: the data cannot be read, or it reports an error.
        """
        self._bytes += len(data)
        if self._bytes > ANSWER_BYTES_MAX:
            raise ModelError(failure.TOO_LARGE)
        if self._start is not None:
            # A server that does not stream answers with an object, whatever its content type.
            self._start += data
            text = self._start.lstrip(b"\xef\xbb\xbf \t\r\n")
            if not text:
                return
            self._json = [] if text.startswith(b"{") else None
            data, self._start = self._start, None
        if self._json is not None:
            self._json.append(data)
            return
        if not self._has_event and len(self._lead) < words.READ_BYTES_MAX:
            self._lead += data[: words.READ_BYTES_MAX]
        try:
            events = self._events.feed(data)
        except EventTooLargeError:
            raise ModelError(failure.TOO_LARGE) from None
        for event in events:
            yield from self._take(event)

    def end(self) -> list[Piece]:
        """Return the last pieces, at the end of the data.

        Raises:
            ModelError: the answer is not whole, or was withheld.
        """
        pieces = self._last_pieces()
        if self._finish_reason is None and not (self.done and self._has_output):
            raise ModelError(failure.TRUNCATED if self._has_output else self._nothing())
        if self._finish_reason == "content_filter":
            raise ModelError(failure.CONTENT_FILTER)
        if self._finish_reason == "error":
            raise ModelError(failure.reported({}))
        lone = [_piece(text, _REPLACEMENT) for text in self._halves]
        return [*pieces, *lone, Finished(reason=self._finish_reason or "")]

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
        found = [each for piece in chunk.pieces(text, whole=whole) for each in self._storable(piece)]
        if len(found) == 1 and type(found[0]) is TextPiece:
            self._has_output = True
            return found
        pieces: list[Piece] = []
        for piece in found:
            if isinstance(piece, Finished):
                self._finish_reason = self._finish_reason or piece.reason
            else:
                self._has_output = self._has_output or not isinstance(piece, UsageReport)
                pieces.append(piece)
        return pieces

    def _storable(self, piece: Piece) -> Iterator[Piece]:
        """Give `piece` without NUL and lone surrogates; the first half of a pair waits for the second."""
        match piece:
            case TextPiece(text=written) | ReasoningPiece(text=written) | RefusalPiece(text=written):
                text: _Text = type(piece), None
            case CallPiece(arguments=written):
                text = CallPiece, piece.index
            case _:
                yield piece
                return
        half = self._halves.pop(text, "")
        if half and not "\udc00" <= written[:1] <= "\udfff":
            yield _piece(text, _REPLACEMENT)
            half = ""
        whole = half + written
        if "\ud800" <= whole[-1:] <= "\udbff":
            self._halves[text], whole = whole[-1], whole[:-1]
        whole = storable(whole)
        if isinstance(piece, CallPiece):
            yield piece if whole == written else msgspec.structs.replace(piece, arguments=whole)
        elif whole:
            yield piece if whole == written else _piece(text, whole)


def _piece(text: _Text, written: str) -> Piece:
    kind, index = text
    return CallPiece(index=index, arguments=written) if issubclass(kind, CallPiece) else kind(text=written)
