"""In-memory conversation reads for job-store."""

from __future__ import annotations

from datetime import datetime

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.chassis.labels import has_all
from pawl.errors import ConversationNotFound
from pawl.job_store.ledger.reading import ConversationFilter, Page
from pawl.job_store.ledger.rpc.messages import text_of
from pawl.job_store.ledger.rules.rows import (
    ClientKey,
    ConversationKey,
    ConversationRow,
    RequestKey,
    RequestRow,
    Segment,
)
from pawl.job_store.ledger.rules.search import words
from tests.simulation.store import Database


class MemoryConversations:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables

    async def by_id(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> ConversationRow:
        await self._database.reach()
        row = self._tables.conversations.get(ConversationKey(store_id, conversation_id))
        if row is None or not row.is_shown_to(user_id):
            raise ConversationNotFound
        return row

    async def by_key(self, key: ClientKey) -> ConversationRow:
        await self._database.reach()
        for row in self._tables.conversations.values():
            if row.client_key == key:
                return row
        raise ConversationNotFound

    async def listed(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: ConversationFilter,
        *,
        before: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[ConversationRow]:
        await self._database.reach()
        rows = [
            row
            for row in self._tables.conversations.values()
            if (row.store_id, row.parent_run_id) == (store_id, "")
            and (row.user_id != user_id and row.is_shown_to(user_id) if wanted.shared else row.user_id == user_id)
            and row.archived in wanted.kinds
            and has_all(row.labels, dict(wanted.labels))
            and (before is None or _position(row) < before)
            and self._has(row, wanted.words)
        ]
        rows.sort(key=_position, reverse=True)
        return Page(rows=rows[:rows_max], has_more=len(rows) > rows_max)

    async def segments(self, conversation: ConversationRow) -> tuple[Segment, ...]:
        await self._database.reach()
        return tuple(
            Segment(
                first_number=each.first_number,
                last_number=each.last_number,
                source_conversation_id=each.source_conversation_id,
            )
            for each in self._tables.segments.get(conversation.key, ())
        )

    async def request(self, key: RequestKey) -> RequestRow | None:
        await self._database.reach()
        return self._tables.requests.get(key)

    def _has(self, row: ConversationRow, wanted: tuple[str, ...]) -> bool:
        texts = [row.title, *(text_of(message.body) for message in self._tables.shown(row.key))]
        return not wanted or any(_fits(wanted, text) for text in texts)


def _fits(wanted: tuple[str, ...], text: str) -> bool:
    return all(any(word.startswith(beginning) for word in words(text)) for beginning in wanted)


def _position(row: ConversationRow) -> tuple[datetime, str]:
    return row.update_time, row.conversation_id
