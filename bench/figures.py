"""A measured figure, beside the target that Pawl has set itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Required, TypedDict, Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure. `target` is a bound in words; `met` says whether `value` is within it, None if there is no bound.

    `spread` has the smallest and largest value where it was measured several times, or the quartiles where it was
    measured often; `detail` has what else was seen.
    `bound` is the bound as a number in `unit`, where the target is one.
    """

    code: str
    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    spread: tuple[float, float] | None = None
    detail: dict[str, float] = field(default_factory=dict)
    bound: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Figure):
    """The same figure of one among several, `series`, which a table shows together. Multiples have no unit."""

    series: str

    @property
    def title(self) -> str:
        """What it is, with its unit if it has one."""
        return f"{self.what}, {self.unit}" if self.unit else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """What could not be measured here, and why."""

    code: str
    why: str


class Measured(TypedDict, total=False):
    """What a figure with a bound is made of; see `Figure`."""

    code: Required[str]
    what: Required[str]
    value: Required[float]
    unit: Required[str]
    spread: tuple[float, float] | None
    detail: dict[str, float]


def at_most(bound: float, **measured: Unpack[Measured]) -> Figure:
    """Return a figure that should not be over `bound`."""
    return _bounded("at most", bound, measured, met=measured["value"] <= bound)


def at_least(bound: float, **measured: Unpack[Measured]) -> Figure:
    """Return a figure that should not be under `bound`."""
    return _bounded("at least", bound, measured, met=measured["value"] >= bound)


def _bounded(words: str, bound: float, measured: Measured, *, met: bool) -> Figure:
    return Figure(**measured, target=f"{words} {bound:g} {measured['unit']}".strip(), met=met, bound=bound)
