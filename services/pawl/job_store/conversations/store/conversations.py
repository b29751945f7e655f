"""Reads conversations from PostgreSQL: by id or key, in lists, and by search."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import ConversationNotFound
from pawl.job_store.ledger.reading import ConversationFilter, Page
from pawl.job_store.ledger.rules import labels
from pawl.job_store.ledger.rules.conversations import absent
from pawl.job_store.ledger.rules.rows import ClientKey, ConversationRow, RequestKey, RequestRow, Segment
from pawl.job_store.ledger.rules.search import mark
from pawl.job_store.ledger.store import run_lists, segments, tables
from pawl.server.db.database import DatabaseAdapter

# The statements are built only from constants in this package.
# ruff: noqa: S608

_BY_ID: Final = f"""
SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations
WHERE store_id = $1 AND conversation_id = $2
AND (user_id = $3 OR erase_user_id = $3 OR (sharing > 1 AND user_id <> ''))
"""
_BY_KEY: Final = f"""
SELECT {tables.CONVERSATIONS.names} FROM job_store.conversations
WHERE store_id = $1 AND user_id = $2 AND key_hash = $3
"""
_REQUEST: Final = f"""
SELECT {tables.REQUESTS.names} FROM job_store.requests WHERE store_id = $1 AND user_id = $2 AND request_id = $3
"""
_SORTED_BY: Final = "store_id, conversation_id, update_time, queue"
_BEFORE: Final = "(update_time, conversation_id) < (coalesce($6::timestamptz, 'infinity'), $7)"
_HAS_LABELS: Final = r"labels <> '' AND string_to_array(labels, E'\n') @> $8"
_LABELLED: Final = f"(cardinality($8::text[]) = 0 OR {_HAS_LABELS})"
# Selects the newest archived and the newest other conversations, as requested, then the newest of both.
LISTED: Final = run_lists.statement(
    tables.CONVERSATIONS,
    source=f"""(
        SELECT c.* FROM unnest($5::boolean[]) AS a (archived) CROSS JOIN LATERAL (
            SELECT {_SORTED_BY} FROM job_store.conversations AS each
            WHERE each.store_id = $3 AND each.user_id = $4 AND each.parent_run_id = '' AND each.archived = a.archived
            AND {_LABELLED} AND {_BEFORE}
            ORDER BY each.update_time DESC, each.conversation_id DESC LIMIT $1
        ) AS c
    )""",
    where="true",
    order="update_time DESC, conversation_id DESC",
    size="length(queue)",
)
WITH_LABELS: Final = run_lists.statement(
    tables.CONVERSATIONS,
    where=f"""store_id = $3 AND user_id = $4 AND parent_run_id = '' AND archived = ANY ($5::boolean[])
        AND {_HAS_LABELS} AND {_BEFORE}""",
    order="update_time DESC, conversation_id DESC",
    size="length(queue)",
)
# The limit bounds the cost of very common words. Conversations are always read by id, regardless of the planner's
# estimates: joining all of a user's conversations with all matches would cost too much. A match also finds forks that
# include the message.
SEARCHED: Final = run_lists.statement(
    tables.CONVERSATIONS,
    source=f"""(
        WITH matching AS MATERIALIZED (
            SELECT store_id, conversation_id, number FROM job_store.conversation_words
            WHERE words @@ $9::text::tsquery LIMIT 10000
        )
        SELECT {_SORTED_BY} FROM (
            SELECT store_id, conversation_id FROM matching
            UNION SELECT m.store_id, s.conversation_id FROM matching AS m CROSS JOIN LATERAL (
                SELECT each.conversation_id FROM job_store.conversation_segments AS each
                WHERE each.store_id = m.store_id AND each.source_conversation_id = m.conversation_id
                AND each.first_number <= m.number AND each.last_number >= m.number OFFSET 0
            ) AS s
        ) AS found CROSS JOIN LATERAL (
            SELECT c.user_id, c.parent_run_id, c.archived, c.update_time, c.queue, c.labels
            FROM job_store.conversations AS c
            WHERE c.store_id = found.store_id AND c.conversation_id = found.conversation_id OFFSET 0
        ) AS each
        WHERE store_id = $3 AND user_id = $4 AND parent_run_id = '' AND archived = ANY ($5::boolean[])
        AND {_LABELLED} AND {_BEFORE}
    )""",
    where="true",
    order="update_time DESC, conversation_id DESC",
    size="length(queue)",
)


# Other users' conversations in the store.
_OF_OTHERS: Final = "store_id = $3 AND user_id <> $4 AND user_id <> '' AND sharing > 1 AND parent_run_id = ''"
SHARED: Final = run_lists.statement(
    tables.CONVERSATIONS,
    where=f"{_OF_OTHERS} AND archived = ANY ($5::boolean[]) AND {_LABELLED} AND {_BEFORE}",
    order="update_time DESC, conversation_id DESC",
    size="length(queue)",
)
SHARED_SEARCHED: Final = SEARCHED.replace(
    "WHERE store_id = $3 AND user_id = $4 AND parent_run_id = ''", f"WHERE {_OF_OTHERS}"
).replace("SELECT c.user_id, c.parent_run_id,", "SELECT c.user_id, c.sharing, c.parent_run_id,")
_SHARERS: Final = """
SELECT user_id FROM (
    SELECT user_id, update_time FROM job_store.conversations
    WHERE store_id = $1 AND user_id <> $2 AND user_id <> '' AND sharing > 1 AND parent_run_id = '' OFFSET 0
) AS shared
GROUP BY user_id ORDER BY max(update_time) DESC LIMIT 100
"""


class PostgresConversations(DatabaseAdapter):
    async def by_id(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> ConversationRow:
        record = await self._database.fetchrow(_BY_ID, store_id, conversation_id, user_id)
        row = None if record is None else tables.CONVERSATIONS.read(record)
        if row is None or not row.is_shown_to(user_id):
            raise absent(row, user_id)
        return row

    async def by_key(self, key: ClientKey) -> ConversationRow:
        record = await self._database.fetchrow(_BY_KEY, key.store_id, key.user_id, key.key_hash)
        if record is None:
            raise ConversationNotFound
        return tables.CONVERSATIONS.read(record)

    async def listed(
        self,
        store_id: StoreId,
        user_id: UserId,
        wanted: ConversationFilter,
        *,
        before: tuple[datetime, str] | None,
        rows_max: int,
    ) -> Page[ConversationRow]:
        lines = labels.lines(store_id, user_id, dict(wanted.labels))
        arguments: tuple[Any, ...] = (store_id, user_id, wanted.kinds, *(before or (None, "")), lines)
        statement = SHARED if wanted.shared else WITH_LABELS if lines else LISTED
        if wanted.words:
            owners: Sequence[UserId] = (user_id,)
            if wanted.shared:
                sharers = await self._database.fetch(_SHARERS, store_id, user_id)
                owners = [UserId(record["user_id"]) for record in sharers]
            if not owners:
                return Page(rows=(), has_more=False)
            words = " | ".join(f"({query(store_id, owner, wanted.words)})" for owner in owners)
            arguments, statement = (*arguments, words), SHARED_SEARCHED if wanted.shared else SEARCHED
        return await run_lists.fetch(self._database, statement, arguments, tables.CONVERSATIONS.read, rows_max=rows_max)

    async def segments(self, conversation: ConversationRow) -> tuple[Segment, ...]:
        if not conversation.past_number:
            return ()
        async with self._database.acquire() as connection:
            return await segments.of(connection, conversation.store_id, conversation.conversation_id)

    async def request(self, key: RequestKey) -> RequestRow | None:
        record = await self._database.fetchrow(_REQUEST, key.store_id, key.user_id, key.request_id)
        return None if record is None else tables.REQUESTS.read(record)


def query(store_id: StoreId, user_id: UserId, words: Sequence[str]) -> str:
    """Return a search query. It matches a text if each prefix in `words` starts at least one word of the text."""
    owner = mark(store_id, user_id)
    # Words consist of letters and digits only, so they need no escaping.
    return " & ".join(f"'{owner}{word}':*" for word in words)
