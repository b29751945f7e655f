"""Reads the calls and the summary of an exported conversation from PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.chassis.ids import CallId, ConversationId, StoreId, UserId
from pawl.job_store.ledger.reading import Page
from pawl.job_store.ledger.rules.rows import CallRow, MessageRow
from pawl.job_store.ledger.store import histories, run_lists, segments, tables
from pawl.server.db.database import DatabaseAdapter

_PAST_NUMBER: Final = """
SELECT past_number FROM job_store.conversations WHERE store_id = $1 AND conversation_id = $2
"""
_CALLS: Final = run_lists.statement(
    tables.CALLS,
    where="""store_id = $3 AND call_id = ANY ($4::text[]) AND (user_id = $5 OR EXISTS (
        SELECT FROM (
            SELECT user_id, sharing, shows_arguments FROM job_store.conversations
            WHERE store_id = t.store_id AND conversation_id = t.conversation_id OFFSET 0
        ) AS c WHERE c.user_id = t.user_id AND c.sharing > 1 AND c.shows_arguments
    ))""",
    order="array_position($4::text[], call_id)",
    size="length(spec) + length(arguments) + coalesce(length(result), 0)",
)


class PostgresExports(DatabaseAdapter):
    async def calls(self, store_id: StoreId, user_id: UserId, call_ids: Sequence[CallId]) -> Page[CallRow]:
        """Return the calls in `call_ids` that the user may read, in the given order, up to about 2 MiB."""
        arguments = (store_id, list(call_ids), user_id)
        return await run_lists.fetch(self._database, _CALLS, arguments, tables.CALLS.read, rows_max=len(call_ids))

    async def summary(self, store_id: StoreId, conversation_id: ConversationId) -> MessageRow | None:
        """Return the newest summary of the owner's part of a conversation."""
        async with self._database.acquire() as connection:
            past_number = await connection.fetchval(_PAST_NUMBER, store_id, conversation_id) or 0
            view = segments.AuthorView(store_id, conversation_id, past_number, UserId(""))
            rows = await histories.from_summary(connection, view, after=0)
        return next((row for row in reversed(rows) if row.summarised_to), None)
