"""Measured figures and their targets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Required, TypedDict, Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measured value with its target.

    `met` is None without a target. `bound` is the target as a number in `unit`, or None if unknown. `spread` is the
    range of several measurements, or the quartiles of many. `detail` contains further observations.
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
    """A figure for one of several `series`, shown together in a table. Multiples have no unit."""

    series: str

    @property
    def title(self) -> str:
        """The name of the figure, and its unit if it has one."""
        return f"{self.what}, {self.unit}" if self.unit else self.what


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """A figure that could not be measured here, and the reason."""

    code: str
    why: str


class Measured(TypedDict, total=False):
    """Measured parts of a figure that has a bound (see `Figure`)."""

    code: Required[str]
    what: Required[str]
    value: Required[float]
    unit: Required[str]
    spread: tuple[float, float] | None
    detail: dict[str, float]


def at_most(bound: float, **measured: Unpack[Measured]) -> Figure:
    """Return a figure that should not exceed `bound`."""
    return _bounded("at most", bound, measured, met=measured["value"] <= bound)


def at_least(bound: float, **measured: Unpack[Measured]) -> Figure:
    """Return a figure that should not be below `bound`."""
    return _bounded("at least", bound, measured, met=measured["value"] >= bound)


def _bounded(words: str, bound: float, measured: Measured, *, met: bool) -> Figure:
    return Figure(**measured, target=f"{words} {bound:g} {measured['unit']}".strip(), met=met, bound=bound)
