"""The words by which programs say of which iterations of a job a conversation is told: as a model writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pawl.errors import InvalidField

_ALONE: Final = frozenset({"every", "change", "end", "none"})
_AMOUNT_MAX: Final = 2**31 - 1


def read(said: object) -> dict[str, Any]:
    """Return the fields of `pawl.event.v1.ReportPolicy` for "end", or {"every": 10}; the kind as "END".

    Raises:
        InvalidField: something else is said.
    """
    if isinstance(said, str) and said.lower() in _ALONE:
        return {"reports": said.upper()}
    if isinstance(said, Mapping) and len(said) == 1:
        ((kind, amount),) = said.items()
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool) and 0 <= amount <= _AMOUNT_MAX
        if is_number and kind == "digest":
            return {"reports": "DIGEST", "report_seconds": float(amount)}
        if is_number and kind == "every" and amount == int(amount):
            return {"reports": "EVERY", "report_iterations": int(amount)}
    message = 'reports is "every", "change", "end", "none", {"every": 10} or {"digest": 600} (seconds)'
    raise InvalidField(message, field="reports")
