"""One statement for all that a group writes."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.job_store.adapters import tables
from pawl.job_store.adapters.columns import Column, Columns, joined
from pawl.job_store.domain.background import Background, Notice
from pawl.job_store.domain.rows import ConversationRow

ROWS: Columns[Any] = Columns(
    "rows",
    [Column("id", "text", str), Column("size", "bigint", len), Column("kind", "text", lambda _: "a", fixed=True)],
    key_length=1,
)
MADE: Columns[Any] = Columns("made", [Column("id", "text", str), Column("size", "bigint", len, of="id")], key_length=1)
ENTRIES: Columns[Any] = Columns("entries", [Column("id", "text", str)], key_length=1, gathered=True)
CONVERSATION = ConversationRow(
    store_id=StoreId("acme"),
    conversation_id=ConversationId("conv"),
    user_id=UserId("ann"),
    create_time=datetime(2026, 5, 1, tzinfo=UTC),
    update_time=datetime(2026, 5, 1, tzinfo=UTC),
)


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


def test_a_column_that_is_made_of_another_has_the_value_that_is_written_there() -> None:
    assert [*MADE.insert(["one", "three"]).columns] == [["one", "three"], [3, 5]]
    assert [*MADE.update([("x", "one"), ("x", "three")]).columns] == [["one", "three"], [3, 5]]


def test_the_background_of_a_conversation_is_packed_once_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bytes] = []

    def pack(value: Any) -> bytes:
        packed.append(msgspec.msgpack.encode(value))
        return packed[-1]

    monkeypatch.setattr(tables, "_pack", pack)
    notices = tuple(Notice(run_id=RunId(f"run_{number}"), occasion=0) for number in range(10))
    row = replace(CONVERSATION, background=Background(open_jobs=1, notices=notices))
    for write in (tables.CONVERSATIONS.insert([row]), tables.CONVERSATIONS.update([(CONVERSATION, row)])):
        assert [value for (value,) in write.columns if isinstance(value, bytes)] == [
            packed[-1],
            hashlib.sha256(packed[-1]).digest(),
        ]
    assert len(packed) == 2
