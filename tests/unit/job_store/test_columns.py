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
from pawl.job_store.domain.background import Background, Notice
from pawl.job_store.domain.rows import ConversationRow

CONVERSATION = ConversationRow(
    store_id=StoreId("acme"),
    conversation_id=ConversationId("conv"),
    user_id=UserId("ann"),
    create_time=datetime(2026, 5, 1, tzinfo=UTC),
    update_time=datetime(2026, 5, 1, tzinfo=UTC),
)


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
