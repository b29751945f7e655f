"""The outside world: a file with one line per effect, which no crash of Pawl can undo.

The order of the lines is the order of the effects of all processes: each line is one append.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One effect, as a line of the file. `bars` marks an answer that a call did not happen, which prevents its effect.

    The `time` in the file is from a monotonic clock, because some faults shift the others.
    """

    time: float
    pid: int
    tool_name: str
    key: str
    run_id: str
    store_id: str
    user_id: str
    arguments: dict[str, Any]
    seen_bytes: int
    bars: bool = False


class EffectFile:
    """The file of effects, which any number of processes may use."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, effect: Effect) -> int:
        line = msgspec.json.encode(effect) + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, line)
            os.fsync(descriptor)
            return os.lseek(descriptor, 0, os.SEEK_CUR) - len(line)
        finally:
            os.close(descriptor)

    def bar(self, question: Effect) -> Effect | None:
        """Return the effect with that key; if there is none, prevent it from happening later."""
        place = self.append(question)
        return next(
            (
                effect
                for begin, effect in self._lines()
                if begin < place and effect.key == question.key and not effect.bars
            ),
            None,
        )

    def is_void(self, effect: Effect, place: int) -> bool:
        """Return whether the effect at this offset came after an answer that it did not happen, and is refused."""
        bars = [begin for begin, line in self._lines() if line.key == effect.key and line.bars]
        return any(effect.seen_bytes <= begin < place for begin in bars)

    def happened(self) -> list[Effect]:
        boot_time = time.time() - time.monotonic()
        bars: dict[str, list[int]] = {}
        effects: list[Effect] = []
        for begin, line in self._lines():
            if line.bars:
                bars.setdefault(line.key, []).append(begin)
            elif not any(line.seen_bytes <= bar for bar in bars.get(line.key, [])):
                effects.append(msgspec.structs.replace(line, time=boot_time + line.time))
        return effects

    def _lines(self) -> Iterator[tuple[int, Effect]]:
        place = 0
        for line in self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []:
            yield place, msgspec.json.decode(line, type=Effect)
            place += len(line)


def effect(path: EffectFile, tool_name: str, context: Any, arguments: dict[str, Any], *, bars: bool = False) -> Effect:
    return Effect(
        time=time.monotonic(),
        pid=os.getpid(),
        tool_name=tool_name,
        key=context.idempotency_key,
        run_id=context.run_id,
        store_id=context.store_id,
        user_id=context.user_id,
        arguments=arguments,
        seen_bytes=path.size_bytes,
        bars=bars,
    )
