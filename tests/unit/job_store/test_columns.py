"""One statement for all that a group writes."""

from __future__ import annotations

from typing import Any

from pawl.job_store.adapters.columns import Column, Columns, joined

ROWS: Columns[Any] = Columns(
    "rows",
    [Column("id", "text", str), Column("size", "bigint", len), Column("kind", "text", lambda _: "a", fixed=True)],
    key_length=1,
)
ENTRIES: Columns[Any] = Columns("entries", [Column("id", "text", str)], key_length=1, gathered=True)


def test_rows_that_come_alone_are_sent_without_arrays_whatever_is_gathered_beside_them() -> None:
    text, arguments = joined([ROWS.insert(["one"]), ROWS.update([("two", "2")]), ENTRIES.insert(["x", "y"])])
    assert text == (
        "WITH part_1 AS (INSERT INTO rows (id, size, kind) SELECT $1::text, $2::bigint, $3::text),"
        " part_4 AS (UPDATE rows t SET size = u.size FROM (SELECT $4::text, $5::bigint) AS u (id, size)"
        " WHERE t.id = u.id),"
        " part_6 AS (INSERT INTO entries (id) SELECT unnest($6::text[])) SELECT"
    )
    assert arguments == ["one", 3, "a", "2", 1, ["x", "y"]]


def test_all_rows_are_sent_in_arrays_as_soon_as_one_table_has_several() -> None:
    text, arguments = joined([ROWS.insert(["one"]), ROWS.update([("two", "2"), ("three", "3")])])
    assert text == (
        "WITH part_1 AS (INSERT INTO rows (id, size, kind)"
        " SELECT unnest($1::text[]), unnest($2::bigint[]), unnest($3::text[])),"
        " part_4 AS (UPDATE rows t SET size = u.size"
        " FROM (SELECT unnest($4::text[]), unnest($5::bigint[])) AS u (id, size) WHERE t.id = u.id) SELECT"
    )
    assert arguments == [["one"], [3], ["a"], ["2", "3"], [1, 1]]
