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
    """The columns of a table, the first `key_length` of them its primary key.

    `beside` names a column that no row has, with its type: an update may give it new values, nothing else touches it.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[Column[R]],
        *,
        key_length: int,
        beside: tuple[str, str] | None = None,
    ) -> None:
        self._columns = tuple(columns)
        key, rest = self._columns[:key_length], self._columns[key_length:]
        self.table = table
        self.key = ", ".join(column.name for column in key)
        self._updated = (*key, *(column for column in rest if not column.fixed))
        self.names = ", ".join(column.name for column in self._columns)
        self.insert_sql = f"INSERT INTO {table} ({self.names}) SELECT * FROM {_unnest(self._columns)}"  # noqa: S608
        added: list[Column[R]] = [Column(*beside, _nothing, heavy=True)] if beside else []
        sent = (*self._updated, *added)
        changes = ", ".join(
            f"{column.name} = coalesce(u.{column.name}, t.{column.name})"
            if column.heavy
            else f"{column.name} = u.{column.name}"
            for column in sent[key_length:]
        )
        matches = " AND ".join(f"t.{column.name} = u.{column.name}" for column in key)
        names = ", ".join(column.name for column in sent)
        self.update_sql = f"UPDATE {table} t SET {changes} FROM {_unnest(sent)} AS u ({names}) WHERE {matches}"  # noqa: S608

    def insert_values(self, rows: Sequence[R]) -> list[list[Any]]:
        """Return the arguments of `insert_sql`: one list a column."""
        return [[column.value(row) for row in rows] for column in self._columns]

    def update_values(self, rows: Sequence[tuple[R, R]], beside: Sequence[Any] | None = None) -> list[Sequence[Any]]:
        """Return the arguments of `update_sql` for rows as (stored, now); None in `beside` leaves a value as it is."""
        values: list[Sequence[Any]] = [_changes(column, rows) for column in self._updated]
        return values if beside is None else [*values, beside]


def _changes(column: Column[R], rows: Sequence[tuple[R, R]]) -> list[Any]:
    value = column.value
    if not column.heavy:
        return [value(row) for _, row in rows]
    return [None if value(stored) is value(row) else value(row) for stored, row in rows]


def _nothing(_: Any) -> None:
    return None


def _unnest(columns: Sequence[Column[R]]) -> str:
    arrays = ", ".join(f"${number}::{column.type}[]" for number, column in enumerate(columns, 1))
    return f"unnest({arrays})"
