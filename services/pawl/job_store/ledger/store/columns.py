"""Set-based statements, generated from the columns of tables. One round trip can write to any number of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

from asyncpg import Record

R = TypeVar("R")

_STATEMENTS_MAX: Final = 1000
# Columns without a field in the row: they are only counted, or selected in addition, such as the time.
_BESIDE: Final = ("notices_pending", "notices_entered", "now", "found", "omitted_bytes")


# Selects the rows that belong to one of the rows that the statement has locked in their expected version.
IS_HEAD: Final = "u.head = ANY ((SELECT numbers FROM heads)::integer[])"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Column(Generic[R]):
    """A column of a table: its SQL type, and how to compute its value from a row.

    `fixed` columns are never updated. An update skips a `heavy` column if the new row holds the same object as the
    stored row. `read` converts the stored value to the row's field. The field's name is `field` or, by default, the
    column's name.
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
    """A statement on rows. `{rows}` in its text is replaced by those rows.

    `types` lists the SQL types of the rows' columns.

    A `gathered` statement usually has many rows. If a statement has a `name`, other statements can refer to its result.
    """

    text: str
    types: tuple[str, ...]
    gathered: bool
    name: str = ""

    def numbered(self, first: int, *, single: bool) -> str:
        """Return the statement with its arguments numbered from `first`.

        Each column has one argument: an array or, with `single`, a value. Arrays are unnested side by side in the
        select list. In FROM, each array would first fill its own tuplestore.
        """
        columns = (
            f"${number}::{type_}" if single else f"unnest(${number}::{type_}[])"
            for number, type_ in enumerate(self.types, first)
        )
        return self.text.format(rows=f"SELECT {', '.join(columns)}")


@dataclass(frozen=True, slots=True)
class Write:
    statement: Statement
    columns: Sequence[Sequence[Any]]


def joined(writes: Sequence[Write], result: str = "") -> tuple[str, list[Any]]:
    """Return one statement, and its arguments, that runs all writes and selects `result`.

    No write sees the changes made by the others.

    If every write (except `gathered` writes) has a single row, the rows are sent without arrays, which cost more. This
    rule keeps the number of different statements small. The server plans each statement once per connection.
    """
    single = all(len(write.columns[0]) == 1 for write in writes if write.columns and not write.statement.gathered)
    text = _joined(tuple(write.statement for write in writes), result, single=single)
    arguments: list[Any] = []
    for write in writes:
        is_row = single and not write.statement.gathered
        arguments += [values[0] for values in write.columns] if is_row else write.columns
    return text, arguments


@lru_cache(_STATEMENTS_MAX)
def _joined(statements: tuple[Statement, ...], result: str, *, single: bool) -> str:
    parts: list[str] = []
    first = 1
    for statement in statements:
        name = f"{statement.name} AS MATERIALIZED" if statement.name else f"part_{len(parts)} AS"
        parts.append(f"{name} ({statement.numbered(first, single=single and not statement.gathered)})")
        first += len(statement.types)
    return f"WITH {', '.join(parts)} SELECT {result}"


class Columns(Generic[R]):
    """The columns of a table.

    The first `key_length` of them are its primary key.

    `beside` is a column without a field in the rows, with its type and initial value. Only `insert` and `update` set
    it. `row` creates a row from its fields. `gathered` tables usually have many rows per write.
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
        names = ", ".join(column.name for column in inserted)
        types = tuple(column.type for column in inserted)
        self._insert = Statement(f"INSERT INTO {table} ({names}) {{rows}}", types, gathered)
        self._insert_guarded = Statement(
            f"INSERT INTO {table} ({names}) SELECT {names} FROM ({{rows}}) AS u (head, {names}) WHERE {IS_HEAD}",  # noqa: S608
            ("integer", *types),
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
        types = tuple(column.type for column in sent)
        self._update, self._update_guarded = (
            Statement(
                f"UPDATE {table} t SET {changes} FROM ({{rows}}) AS u ({head}{names}) WHERE {matches}{condition}",  # noqa: S608
                (*head_type, *types),
                gathered,
            )
            for head, head_type, condition in (("", (), ""), ("head, ", ("integer",), f" AND {IS_HEAD}"))
        )

    def read(self, record: Record | Mapping[str, Any]) -> R:
        fields = dict(record)
        for name in _BESIDE:
            fields.pop(name, None)
        for name, field, read in self._reads:
            fields[field] = read(fields.pop(name))
        return self._row(**fields)

    def fields(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self._names, values, strict=True))

    def insert(
        self, rows: Sequence[R], beside: Sequence[Any] | None = None, heads: Sequence[int] | None = None
    ) -> Write:
        """Return a write that inserts new rows. None in `beside` means the initial value.

        With `heads`, a number for each row, only rows whose number is in the result of the statement `heads` are
        inserted.
        """
        values: list[Sequence[Any]] = [[column.value(row) for row in rows] for column in self._columns]
        if self._beside is not None:
            first = self._beside[2]
            values.append([first if value is None else value for value in beside or [None] * len(rows)])
        return Write(self._insert, values) if heads is None else Write(self._insert_guarded, [heads, *values])

    def update(
        self, rows: Sequence[tuple[R, R]], beside: Sequence[Any] | None = None, heads: Sequence[int] | None = None
    ) -> Write:
        """Return a write that updates rows, given as (stored, new) pairs. None in `beside` leaves a value unchanged.

        `heads` works as in `insert`.
        """
        values: list[Sequence[Any]] = [_changes(column, rows) for column in self._updated]
        if beside is not None:
            values.append(beside)
        return Write(self._update, values) if heads is None else Write(self._update_guarded, [heads, *values])


def _changes(column: Column[R], rows: Sequence[tuple[R, R]]) -> list[Any]:
    value = column.value
    if not column.heavy:
        return [value(row) for _, row in rows]
    return [None if value(stored) is value(row) else value(row) for stored, row in rows]


def _nothing(_: Any) -> None:
    return None
