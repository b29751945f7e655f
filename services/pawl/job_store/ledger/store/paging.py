"""Pages of rows, cut by number and by bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from asyncpg import Record

from pawl.chassis.db.database import Connection, Database
from pawl.job_store.ledger.reading import Page

R = TypeVar("R")

PAGE_BYTES_MAX: Final = 2 * 1024 * 1024
"""A page that has reached this size takes no more rows."""


class Rows(Protocol):
    """The rows of a table: the names of their columns, and of those that are their key."""

    @property
    def table(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def names(self) -> str: ...


def statement(rows: Rows, *, where: str, order: str, size: str, source: str = "") -> str:
    """Return a statement for a page: $1 is the most rows, plus one, and $2 the most bytes; `where` has the others.

    All parts are constants of the caller. `source` is what the rows are looked for in, if it is not the whole table.
    """
    return f"""
        WITH sized AS MATERIALIZED (
            SELECT {rows.key}, sum({size}) OVER (ORDER BY {order}) - ({size}) AS bytes_before
            FROM {source or rows.table} AS t WHERE {where} ORDER BY {order} LIMIT $1
        )
        SELECT {rows.names}, (SELECT count(*) FROM sized) AS found
        FROM {rows.table} JOIN sized USING ({rows.key}) WHERE bytes_before < $2 ORDER BY {order}
        """  # noqa: S608


async def fetch(
    database: Database | Connection, sql: str, arguments: Sequence[Any], read: Callable[[Record], R], *, rows_max: int
) -> Page[R]:
    """Return a page by a statement made with `statement`; at least one row if there is any.

    Records have the column `found` beside those of a row.
    """
    records = await database.fetch(sql, rows_max + 1, PAGE_BYTES_MAX, *arguments)
    found = records[0]["found"] if records else 0
    rows = [read(record) for record in records[:rows_max]]
    return Page(rows=rows, has_more=found > len(rows))
