"""The short form of a job's report policy, as models and programs write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pawl.errors import InvalidField

_ALONE: Final = frozenset({"every", "change", "end", "none"})
_AMOUNT_MAX: Final = 2**31 - 1
_PERCENTS_MAX: Final = 20
_PERCENT_MAX: Final = 99
# Minimum and maximum seconds between two reports of a call's progress.
_SECONDS_MIN: Final = 60.0
_SECONDS_MAX: Final = 31_536_000.0


def read(value: object) -> dict[str, Any]:
    """Return the fields of `pawl.event.v1.ReportPolicy` for a value such as "end" or {"every": 10}.

    Raises:
        InvalidField: The value is malformed.
    """
    if isinstance(value, str) and value.lower() in _ALONE:
        return {"reports": value.upper()}
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, amount),) = value.items()
        if kind == "progress" and isinstance(amount, Sequence) and not isinstance(amount, str | bytes):
            percents = tuple(amount)
            return _progress(percents, 0.0) | {"report_percents": percents}
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount <= _AMOUNT_MAX
        if is_number and kind == "minutes":
            return _progress((), amount * 60.0) | {"report_seconds": amount * 60.0}
        if is_number and kind == "digest":
            return {"reports": "DIGEST", "report_seconds": float(amount)}
        if is_number and kind == "every" and amount == int(amount):
            return {"reports": "EVERY", "report_iterations": int(amount)}
    message = (
        'reports must be "every", "change", "end", "none", {"every": 10} or {"digest": 600} (seconds); for a '
        'single call, {"progress": [25, 50, 75]} (percent) or {"minutes": 10}'
    )
    raise InvalidField(message, field="reports")


def progress_problem(percents: Sequence[object], seconds: float) -> str:
    """Return the problem with progress-report values for a single call, or an empty string if they are valid."""
    if bool(percents) is bool(seconds):
        return 'either {"progress": [25, 50, 75]} or {"minutes": 10} is required'
    if seconds:
        is_fit = _SECONDS_MIN <= seconds <= _SECONDS_MAX
        return "" if is_fit else f"minutes must be between 1 and {_SECONDS_MAX / 60:.0f}, got {seconds / 60:g}"
    numbers = [
        each for each in percents if isinstance(each, int) and not isinstance(each, bool) and 1 <= each <= _PERCENT_MAX
    ]
    if len(percents) > _PERCENTS_MAX or numbers != sorted({*numbers}) or len(numbers) < len(percents):
        return (
            f"progress must be up to {_PERCENTS_MAX} whole percentages between 1 and {_PERCENT_MAX}, in ascending order"
        )
    return ""


def _progress(percents: Sequence[object], seconds: float) -> dict[str, Any]:
    if problem := progress_problem(percents, seconds):
        raise InvalidField(problem, field="reports")
    return {"reports": "PROGRESS"}
