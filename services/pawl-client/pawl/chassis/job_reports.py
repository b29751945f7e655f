"""Parses the short form in which models and programs write a job's report policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pawl.errors import InvalidField

_ALONE: Final = frozenset({"every", "change", "end", "none"})
_AMOUNT_MAX: Final = 2**31 - 1


def read(value: object) -> dict[str, Any]:
    """Return the fields of `pawl.event.v1.ReportPolicy` for a value such as "end" or {"every": 10}.

    Raises:
        InvalidField: The value is malformed.
    """
    if isinstance(value, str) and value.lower() in _ALONE:
        return {"reports": value.upper()}
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, amount),) = value.items()
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount <= _AMOUNT_MAX
        if is_number and kind == "digest":
            return {"reports": "DIGEST", "report_seconds": float(amount)}
        if is_number and kind == "every" and amount == int(amount):
            return {"reports": "EVERY", "report_iterations": int(amount)}
    message = 'reports must be "every", "change", "end", "none", {"every": 10} or {"digest": 600} (seconds)'
    raise InvalidField(message, field="reports")
