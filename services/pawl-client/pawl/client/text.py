"""Assembles a run's text from its events."""

from __future__ import annotations

from typing import Final, Self

from pawl.event.v1 import event_pb2, gap_pb2, message_pb2

_BETWEEN: Final = "\n\n"


class Piece(str):
    """A piece of a run's text. Before you append it, remove the last `takes_back` characters of the text so far.

    `takes_back` is 0 unless a model call failed midway and is being retried, another worker has taken over the run, or
    events are missing. `seq` is the event's seq.
    """

    __slots__ = ("seq", "takes_back")
    takes_back: int
    seq: int

    def __new__(cls, text: str, takes_back: int = 0) -> Self:
        piece = super().__new__(cls, text)
        piece.takes_back, piece.seq = takes_back, 0
        return piece


class TextReader:
    """Reads one run's text, event by event.

    The combined pieces are the model's answers so far, separated by blank lines, followed by the start of the next
    answer. Summaries are not answers.
    """

    def __init__(self) -> None:
        self._answers: list[str] = []
        self._open: list[str] = []
        self._attempt = 0
        self._round = (0, 0)
        self._is_summary = False

    def take(self, event: event_pb2.RunEvent | gap_pb2.Gap) -> Piece | None:
        """Return the piece that an event adds to the text. Return None if the event does not change the text."""
        piece = self._take(event)
        if piece is not None:
            piece.seq = event.to_seq if isinstance(event, gap_pb2.Gap) else event.seq
        return piece

    def _take(self, event: event_pb2.RunEvent | gap_pb2.Gap) -> Piece | None:
        if isinstance(event, gap_pb2.Gap):
            shown = self._text()
            self._open, self._answers = [], []
            for message in event.snapshot.messages:
                self._add(message)
            return self._change(shown)
        is_new_worker = event.attempt > self._attempt > 0
        self._attempt = max(self._attempt, event.attempt)
        kind = event.WhichOneof("kind")
        if kind == "output_delta":
            delta = event.output_delta
            before, self._round = self._round, (delta.round, delta.model_attempt)
            return self._delta(delta.text or delta.refusal, anew=is_new_worker or before != self._round)
        if not (is_new_worker or kind in {"round_started", "round_retrying", "message_added"}):
            return None
        shown = self._text()
        if kind == "round_started":
            self._is_summary = event.round_started.summary
        if is_new_worker or event.message_added.message.role != message_pb2.ROLE_USER:
            self._open = []
        if kind == "message_added":
            self._add(event.message_added.message)
        return self._change(shown)

    def _delta(self, text: str, *, anew: bool) -> Piece | None:
        if self._is_summary:
            return None
        if anew and self._open:
            shown, self._open = self._text(), [text] if text else []
            return self._change(shown)
        if not text:
            return None
        between = _BETWEEN if self._answers and not self._open else ""
        self._open.append(text)
        return Piece(between + text)

    def _add(self, message: message_pb2.Message) -> None:
        text = message.text or message.refusal
        if message.role == message_pb2.ROLE_ASSISTANT and text:
            self._answers.append(text)

    def _text(self) -> str:
        open_text = "".join(self._open)
        return _BETWEEN.join([*self._answers, *([open_text] if open_text else [])])

    def _change(self, before: str) -> Piece | None:
        after = self._text()
        if after == before:
            return None
        kept = len(before)
        if not after.startswith(before):
            pairs = enumerate(zip(before, after, strict=False))
            kept = next((number for number, (one, other) in pairs if one != other), len(after))
        return Piece(after[kept:], len(before) - kept)
