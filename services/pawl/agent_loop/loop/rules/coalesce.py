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

INTERVAL_SECONDS: Final = 0.1
PIECES_MAX: Final = 10
# Limits the size of one event.
OUTPUT_CHARACTERS_MAX: Final = 64 * 1024

DisplayPiece = TextPiece | ReasoningPiece | RefusalPiece | CallPiece


class Coalescer:
    """Holds pieces back until it is time to show them.

    The first piece is due immediately, later ones when 10 are held or 100 ms after the last output. A burst of 100
    pieces therefore produces at most 11 outputs, and 100 pieces at 20 ms intervals at most 22. Within one output,
    text, reasoning and calls each keep their own order, but not their order relative to each other. `now` is the time
    of any monotonic clock, in seconds.
    """

    def __init__(self, head: OutputDelta) -> None:
        """Outputs are copies of `head`, which has no content."""
        self._head = head
        self._pieces: list[DisplayPiece] = []
        self._shown_at: float | None = None

    def add(self, piece: Piece) -> None:
        """Add a piece that `Assembly.add` returned. Pieces that are not for display are ignored."""
        if isinstance(piece, DisplayPiece):
            self._pieces.append(piece)

    def due_at(self) -> float | None:
        """Return when the held pieces are due; 0 means immediately, and None means that nothing is held."""
        if not self._pieces:
            return None
        if self._shown_at is None or len(self._pieces) >= PIECES_MAX:
            return 0.0
        return self._shown_at + INTERVAL_SECONDS

    def take(self, now: float) -> tuple[OutputDelta, ...]:
        """Return all held pieces as one output, whether or not they are due.

        Returns several outputs only if one would be too large.
        """
        if not self._pieces:
            return ()
        pieces, self._pieces = self._pieces, []
        self._shown_at = now
        return tuple(_join(self._head, group) for group in _groups(pieces))


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
    """Join pieces into one output. Calls keep the order in which they were written."""
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
