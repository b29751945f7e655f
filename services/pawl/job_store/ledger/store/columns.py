"""Set-based statements, made from the columns of a table: one round trip for any number of rows of any tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

from asyncpg import Record

R = TypeVar("R")

_STATEMENTS_MAX: Final = 1000
# What no row has: columns that are only counted, and what statements select besides, such as the time.
_BESIDE: Final = ("notices_pending", "notices_entered", "now", "found", "omitted_bytes")


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column: its type in SQL, and where its value comes from.

    `fixed` columns are never updated. `heavy` ones are left alone by an update
    whose row holds the very same object as the stored one. `read` makes of what is stored the field of the row, which
    has the name of the column or that of `field`.
    """

    name: str
    type: str
    value: Callable[[R], Any]
    fixed: bool = False
    heavy: bool = False
    read: Callable[[Any], Any] = _same
    field: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """A statement on rows that stand in for `{rows}` in its text; `types` are those of their columns, in SQL.

    Of `gathered` rows there are many as often as one.
    """

    text: str
    types: tuple[str, ...]
    gathered: bool

    def numbered(self, first: int, *, single: bool) -> str:
        """Return the statement with its arguments, one a column, numbered from `first`: arrays, or those of one row.

        Arrays are unnested side by side in a list of columns: in FROM each one fills a store of its own first.
        """
        columns = (
            f"${number}::{type_}" if single else f"unnest(${number}::{type_}[])"
            for number, type_ in enumerate(self.types, first)
        )
        return self.text.format(rows=f"SELECT {', '.join(columns)}")


@dataclass(frozen=True, slots=True)
class Write:
    """A statement with its rows: a list of values for each column."""

    statement: Statement
    columns: Sequence[Sequence[Any]]


def joined(writes: Sequence[Write]) -> tuple[str, list[Any]]:
    """Return one statement that does them all, each by itself, and its arguments: no write sees what another does.

    Rows that come alone are sent without arrays, which cost more than they do; but only if all do, so that there are
    few different statements: the server plans each of them once a connection.
    """
    single = all(len(write.columns[0]) == 1 for write in writes if not write.statement.gathered)
    text = _joined(tuple(write.statement for write in writes), single=single)
    arguments: list[Any] = []
    for write in writes:
        is_row = single and not write.statement.gathered
        arguments += [values[0] for values in write.columns] if is_row else write.columns
    return text, arguments


@lru_cache(_STATEMENTS_MAX)
def _joined(statements: tuple[Statement, ...], *, single: bool) -> str:
    parts: list[str] = []
    first = 1
    for statement in statements:
        parts.append(f"part_{first} AS ({statement.numbered(first, single=single and not statement.gathered)})")
        first += len(statement.types)
    return f"WITH {', '.join(parts)} SELECT"


class Columns(Generic[R]):
    """The columns of a table, the first `key_length` of them its primary key.

    `beside` names a column that no row has, with its type and what it is at first: whoever writes rows may give it
    values, nothing else touches it.
    `row` makes a row of its fields. Of `gathered` rows there are many as often as one.
    """

    def __init__(
        self,
        table: str,
        row: Callable[..., R],
        columns: Sequence[Column[R]],
        *,
        key_length: int,
        beside: tuple[str, str, Any] | None = None,
        gathered: bool = False,
    ) -> None:
        self._columns = tuple(columns)
        self._row = row
        self._reads = [
            (column.name, column.field or column.name, column.read)
            for column in self._columns
            if column.field or column.read is not _same
        ]
        key, rest = self._columns[:key_length], self._columns[key_length:]
        self.table = table
        self._names = tuple(column.name for column in self._columns)
        self.length = len(self._columns)
        self.key = ", ".join(column.name for column in key)
        self._updated = (*key, *(column for column in rest if not column.fixed))
        self.names = ", ".join(self._names)
        self.nulls = ", ".join(f"NULL::{column.type}" for column in self._columns)
        self._beside = beside
        added: list[Column[R]] = [Column(*beside[:2], _nothing, heavy=True)] if beside else []
        inserted = (*self._columns, *added)
        self._insert = Statement(
            f"INSERT INTO {table} ({', '.join(column.name for column in inserted)}) {{rows}}",
            tuple(column.type for column in inserted),
            gathered,
        )
        sent = (*self._updated, *added)
        changes = ", ".join(
            f"{column.name} = coalesce(u.{column.name}, t.{column.name})"
            if column.heavy
            else f"{column.name} = u.{column.name}"
            for column in sent[key_length:]
        )
        matches = " AND ".join(f"t.{column.name} = u.{column.name}" for column in key)
        names = ", ".join(column.name for column in sent)
        self._update = Statement(
            f"UPDATE {table} t SET {changes} FROM ({{rows}}) AS u ({names}) WHERE {matches}",  # noqa: S608
            tuple(column.type for column in sent),
            gathered,
        )

    def read(self, record: Record | Mapping[str, Any]) -> R:
        """Return the row of a record with these columns, and perhaps those that are `_BESIDE` them."""
        fields = dict(record)
        for name in _BESIDE:
            fields.pop(name, None)
        for name, field, read in self._reads:
            fields[field] = read(fields.pop(name))
        return self._row(**fields)

    def fields(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the values of a row by the names of its columns."""
        return dict(zip(self._names, values, strict=True))

    def insert(self, rows: Sequence[R], beside: Sequence[Any] | None = None) -> Write:
        """Return what writes new rows; None in `beside` is what the column is at first."""
        values = [[column.value(row) for row in rows] for column in self._columns]
        if self._beside is not None:
            first = self._beside[2]
            values.append([first if value is None else value for value in beside or [None] * len(rows)])
        return Write(self._insert, values)

    def update(self, rows: Sequence[tuple[R, R]], beside: Sequence[Any] | None = None) -> Write:
        """Return what writes rows, as (stored, now), that are there; None in `beside` leaves a value as it is."""
        values: list[Sequence[Any]] = [_changes(column, rows) for column in self._updated]
        return Write(self._update, values if beside is None else [*values, beside])


def _changes(column: Column[R], rows: Sequence[tuple[R, R]]) -> list[Any]:
    value = column.value
    if not column.heavy:
        return [value(row) for _, row in rows]
    return [None if value(stored) is value(row) else value(row) for stored, row in rows]


def _nothing(_: Any) -> None:
    return None
