"""Batches that belong to many stores: each row is read alone, so a bad one holds up no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pawl.chassis.process import logs

R = TypeVar("R")
T = TypeVar("T")

_log = logs.get_logger(__name__)


def read_each(kind: str, rows: Iterable[R], read: Callable[[R], T], id_of: Callable[[R], object]) -> list[T]:
    """Return what `read` makes of each row. A row for which it raises is logged with its id and left out."""
    found: list[T] = []
    for row in rows:
        try:
            found.append(read(row))
        except Exception:  # noqa: BLE001  # the other rows are read
            _log.exception("row.unreadable", kind=kind, id=id_of(row))
    return found
