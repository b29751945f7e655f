"""Set-based statements, made from the columns of a table: one round trip for any number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column: its type in SQL, and where its value comes from.

    `fixed` columns are never updated. `heavy` ones are left alone by an update
    whose row holds the very same object as the stored one.
    """

    name: str
    type: str
    value: Callable[[R], Any]
    fixed: bool = False
    heavy: bool = False


class Columns(Generic[R]):
    """The columns of a table, the first `key_length` of them its primary key."""

    def __init__(self, table: str, columns: Sequence[Column[R]], *, key_length: int) -> None:
        self._columns = tuple(columns)
        key, rest = self._columns[:key_length], self._columns[key_length:]
        self._updated = (*key, *(column for column in rest if not column.fixed))
        self.names = ", ".join(column.name for column in self._columns)
        self.insert_sql = f"INSERT INTO {table} ({self.names}) SELECT * FROM {_unnest(self._columns)}"  # noqa: S608
        changes = ", ".join(
            f"{column.name} = coalesce(u.{column.name}, t.{column.name})"
            if column.heavy
            else f"{column.name} = u.{column.name}"
            for column in self._updated[key_length:]
        )
        matches = " AND ".join(f"t.{column.name} = u.{column.name}" for column in key)
        updated = ", ".join(column.name for column in self._updated)
        self.update_sql = (
            f"UPDATE {table} t SET {changes} FROM {_unnest(self._updated)} AS u ({updated}) WHERE {matches}"  # noqa: S608
        )

    def insert_values(self, rows: Sequence[R]) -> list[list[Any]]:
        """Return the arguments of `insert_sql`: one list a column."""
        return [[column.value(row) for row in rows] for column in self._columns]

    def update_values(self, rows: Sequence[tuple[R, R]]) -> list[list[Any]]:
        """Return the arguments of `update_sql` for rows as (stored, now)."""
        return [_changes(column, rows) for column in self._updated]


def _changes(column: Column[R], rows: Sequence[tuple[R, R]]) -> list[Any]:
    value = column.value
    if not column.heavy:
        return [value(row) for _, row in rows]
    return [None if value(stored) is value(row) else value(row) for stored, row in rows]


def _unnest(columns: Sequence[Column[R]]) -> str:
    arrays = ", ".join(f"${number}::{column.type}[]" for number, column in enumerate(columns, 1))
    return f"unnest({arrays})"
