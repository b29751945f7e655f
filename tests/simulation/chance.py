"""Randomness of a simulation: one seed, with a separate stream for each part."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Chance:
    """Random decisions of one seed.

    Each seed has its own kinds and rates of faults, because a seed with a single kind reaches deeper states than a seed
    with a little of each.
    """

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    calm: bool = False
    _rates: dict[str, float] = field(default_factory=dict)

    def stream(self, *names: object) -> random.Random:
        return random.Random(f"{self.seed}/{'/'.join(map(str, names))}")

    def strikes(self, draw: random.Random, kind: str, rate: float) -> bool:
        """Return whether a fault of `kind` happens now, and count it. No fault happens once `calm` is set."""
        drawn = draw.random()
        if self.calm or drawn >= rate * self._rate(kind):
            return False
        self.faults[kind] += 1
        return True

    def _rate(self, kind: str) -> float:
        if kind not in self._rates:
            self._rates[kind] = self.stream("rate", kind).choice([0.0, 0.0, 1.0, 1.0, 4.0])
        return self._rates[kind]


def fix_hashes(module: str) -> None:
    """Restart the program with PYTHONHASHSEED=0, because the iteration order of sets affects the trace."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})  # noqa: S606  # this very program
