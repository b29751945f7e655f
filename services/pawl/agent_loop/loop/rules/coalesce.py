"""Few events from many pieces: what watchers see of an answer, and when."""

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
OUTPUT_CHARACTERS_MAX: Final = 64 * 1024
"""Most characters of one output, so that no event is too large for a watcher."""

DisplayPiece = TextPiece | ReasoningPiece | RefusalPiece | CallPiece


class Coalescer:
    """Holds pieces back until it is time to show them.

    The first piece is due at once, later ones when 10 wait or 100 ms after the
    last output. So 100 pieces at once give at most 11 outputs, and at 20 ms a
    piece at most 22. Within one output the order between text, reasoning and
    calls is lost; the order within each is kept. `now` is any clock in seconds
    that never goes back.
    """

    def __init__(self, head: OutputDelta) -> None:
        """Make outputs that are like `head`, which has nothing in it."""
        self._head = head
        self._pieces: list[DisplayPiece] = []
        self._shown_at: float | None = None

    def add(self, piece: Piece) -> None:
        """Take a piece, as `Assembly.add` returned it; what is not for display is ignored."""
        if isinstance(piece, DisplayPiece):
            self._pieces.append(piece)

    def due_at(self) -> float | None:
        """Return when the pieces held are to be shown: any time not after now means at once.

        None if nothing is held.
        """
        if not self._pieces:
            return None
        if self._shown_at is None or len(self._pieces) >= PIECES_MAX:
            return 0.0
        return self._shown_at + INTERVAL_SECONDS

    def take(self, now: float) -> tuple[OutputDelta, ...]:
        """Return all pieces held, joined, whether or not they are due.

        One output, or none; several only where one would be too large.
        """
        if not self._pieces:
            return ()
        pieces, self._pieces = self._pieces, []
        self._shown_at = now
        return tuple(_join(self._head, group) for group in _groups(pieces))


def _groups(pieces: list[DisplayPiece]) -> Iterator[list[DisplayPiece]]:
    """Give the pieces in groups of at most OUTPUT_CHARACTERS_MAX characters."""
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
    """Return pieces as one output. The calls stand in the order they were written."""
    return replace(
        head,
        text=storable("".join(piece.text for piece in pieces if isinstance(piece, TextPiece))),
        reasoning=storable("".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))),
        refusal=storable("".join(piece.text for piece in pieces if isinstance(piece, RefusalPiece))),
        calls=tuple(_fragments([piece for piece in pieces if isinstance(piece, CallPiece)])),
    )


def _fragments(pieces: list[CallPiece]) -> Iterator[CallFragment]:
    """Give the pieces with those next to each other of one call joined."""
    for index, group in itertools.groupby(pieces, key=lambda piece: piece.index):
        parts = tuple(group)
        yield CallFragment(
            index=index or 0,
            tool_name=tool_name(parts[-1].name),
            arguments_text=storable("".join(part.arguments for part in parts)),
        )
