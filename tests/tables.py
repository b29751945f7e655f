"""Tables of bad input, each checked by one test that names every row which was not refused as it should be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def not_refused(error: type[Exception], call: Callable[[T], Any], rows: Iterable[T]) -> list[T]:
    """Return the rows with which a call does not raise the error."""
    return [row for row in rows if refusal(error, lambda row=row: call(row)) is None]  # type: ignore[misc]


def not_explained(
    error: type[Exception], call: Callable[[T], Any], rows: Mapping[T, str] | Iterable[tuple[T, str]]
) -> list[tuple[T, str, str | None]]:
    """Return the rows with which a call does not raise the error, or says nothing that matches; and what it says."""
    pairs = rows.items() if isinstance(rows, Mapping) else rows
    told = [(row, says, refusal(error, lambda row=row: call(row))) for row, says in pairs]  # type: ignore[misc]
    return [(row, says, found) for row, says, found in told if found is None or not re.search(says, found)]


def refusal(error: type[Exception], call: Callable[[], Any]) -> str | None:
    """Return what a call says when it raises the error; None if it does not raise."""
    try:
        call()
    except error as raised:
        return str(raised)
    return None
