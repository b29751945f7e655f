"""A measured figure, beside the target that Pawl has set itself."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure. `target` is a bound in words; `met` says whether `value` is within it, None if there is no bound.

    `spread` has the smallest and largest value where it was measured several times, and `detail` what else was seen.
    """

    code: str
    what: str
    value: float
    unit: str
    target: str = ""
    met: bool | None = None
    spread: tuple[float, float] | None = None
    detail: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """What could not be measured here, and why."""

    code: str
    why: str
