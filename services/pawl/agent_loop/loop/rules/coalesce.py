"""Combines the pieces of an answer into fewer events for watchers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.fact import CallFragment, OutputDelta
from pawl.agent_loop.loop.rules.text import tool_name
from pawl.agent_loop.model.request import CallPiece, Piece, ReasoningPiece, RefusalPiece, TextPiece
from pawl.chassis.strict_json import storable

# Maximum time that a piece is held.
HELD_SECONDS_MAX: Final = 1.0
# Minimum pause between two outputs.
PAUSE_SECONDS_MIN: Final = 0.1
# The pause after an output is at least this many times the output's delay, so that committing output takes up little of
# a busy machine's time and commits cannot delay each other.
PAUSE_PER_DELAY: Final = 10.0
# Maximum number of characters in one event.
OUTPUT_CHARACTERS_MAX: Final = 64 * 1024

DisplayPiece = TextPiece | ReasoningPiece | RefusalPiece | CallPiece


class Coalescer:
    """A buffer for an answer's pieces, which holds them until it is time to show them.

    The first piece is due immediately. Later pieces are due after a pause that starts when the previous output becomes
    visible. The pause is 100 ms or ten times the delay of the previous output, whichever is longer. Every piece is due
    within 1 s of its arrival, unless the ledger requests a longer pause. Within one output, text, reasoning and calls
    are each kept in order, but not relative to each other. `now` is the time of any monotonic clock, in seconds.
    """

    def __init__(self, head: OutputDelta) -> None:
        """Create a coalescer. Each output is a copy of `head` to which pieces are added. `head` must be empty."""
        self._head = head
        self._pieces: list[DisplayPiece] = []
        self._oldest_at = 0.0
        # When the last output was taken or shown, or the answer ended.
        self._pause_from: float | None = None
        self._pause_seconds = PAUSE_SECONDS_MIN
        # The pause that the ledger last requested.
        self._pause_seconds_min = 0.0
        # When the output that is being committed was due.
        self._taken_due_at: float | None = None

    def add(self, piece: Piece, now: float) -> None:
        """Add a piece that `Assembly.add` returned. Ignore pieces that are not shown to watchers."""
        if isinstance(piece, DisplayPiece):
            self._oldest_at = self._oldest_at if self._pieces else now
            self._pieces.append(piece)

    def end(self, now: float) -> None:
        """Record that the answer is complete.

        The pause restarts, because the answer's step also shows the remaining pieces.
        """
        self._pause_from = now

    def due_at(self) -> float | None:
        """Return when the held pieces are due, or None if no pieces are held."""
        if not self._pieces:
            return None
        if self._pause_from is None:
            return self._oldest_at
        pause = max(self._pause_seconds, self._pause_seconds_min)
        held = max(HELD_SECONDS_MAX, self._pause_seconds_min)
        return min(self._oldest_at + held, max(self._oldest_at, self._pause_from + pause))

    def take(self, now: float) -> tuple[OutputDelta, ...]:
        """Return all held pieces, whether or not they are due. Call `shown` once they are committed.

        All pieces are joined into one output, unless it would be too large.
        """
        due = self.due_at()
        if due is None:
            return ()
        pieces, self._pieces = self._pieces, []
        self._pause_from = now
        self._taken_due_at = min(due, now) if self._taken_due_at is None else self._taken_due_at
        return tuple(_join(self._head, group) for group in _groups(pieces))

    def shown(self, now: float, pause_seconds_min: float | None = None) -> None:
        """Record that everything returned by `take` is visible. Adapt the pause to the delay.

        `pause_seconds_min` replaces the minimum pause, unless it is None.
        """
        if pause_seconds_min is not None:
            self._pause_seconds_min = pause_seconds_min
        if self._taken_due_at is not None:
            self._pause_from = now
            delay = now - self._taken_due_at
            self._pause_seconds = max(PAUSE_SECONDS_MIN, PAUSE_PER_DELAY * delay)
            self._taken_due_at = None


def _groups(pieces: list[DisplayPiece]) -> Iterator[list[DisplayPiece]]:
    """Yield groups of pieces with at most OUTPUT_CHARACTERS_MAX characters."""
    group: list[DisplayPiece] = []
    room = OUTPUT_CHARACTERS_MAX
    for piece in itertools.chain.from_iterable(map(_split, pieces)):
        length = len(_characters(piece))
        if length > room:
            yield group
            group, room = [], OUTPUT_CHARACTERS_MAX
        group.append(piece)
        room -= length
    yield group


def _split(piece: DisplayPiece) -> Iterator[DisplayPiece]:
    characters = _characters(piece)
    if len(characters) <= OUTPUT_CHARACTERS_MAX:
        yield piece
        return
    for start in range(0, len(characters), OUTPUT_CHARACTERS_MAX):
        part = characters[start : start + OUTPUT_CHARACTERS_MAX]
        yield replace(piece, arguments=part) if isinstance(piece, CallPiece) else replace(piece, text=part)


def _characters(piece: DisplayPiece) -> str:
    return piece.arguments if isinstance(piece, CallPiece) else piece.text


def _join(head: OutputDelta, pieces: list[DisplayPiece]) -> OutputDelta:
    """Join pieces into one output. Calls stay in the order in which they were written."""
    return replace(
        head,
        text=storable("".join(piece.text for piece in pieces if isinstance(piece, TextPiece))),
        reasoning=storable("".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))),
        refusal=storable("".join(piece.text for piece in pieces if isinstance(piece, RefusalPiece))),
        calls=tuple(_fragments([piece for piece in pieces if isinstance(piece, CallPiece)])),
    )


def _fragments(pieces: list[CallPiece]) -> Iterator[CallFragment]:
    for index, group in itertools.groupby(pieces, key=lambda piece: piece.index):
        parts = tuple(group)
        yield CallFragment(
            index=index or 0,
            tool_name=tool_name(parts[-1].name),
            arguments_text=storable("".join(part.arguments for part in parts)),
        )
