"""The search index for conversations in PostgreSQL.

The index is updated in the background, so writers never wait for it.

A transaction that empties messages must also change the conversation's `searched_number` and remove those messages'
words. Otherwise, the indexer could still write words that it read before the change.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from asyncpg import Record

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.job_store.ledger.rpc.messages import text_of
from pawl.job_store.ledger.rules.search import mark, words
from pawl.server.db.database import Connection, DatabaseAdapter, read_each

# Newest first: users search for recent messages most often.
_DUE: Final = """
SELECT store_id, conversation_id, user_id, last_number, title, searched_number, searched_title, model_title
FROM job_store.conversations
WHERE parent_run_id = '' AND (searched_number < last_number OR searched_title <> title) AND user_id <> ''
ORDER BY update_time DESC LIMIT $1
"""
# A few messages of each conversation. Messages beyond the byte limit have no body.
_MESSAGES: Final = """
SELECT store_id, conversation_id, number, CASE WHEN bytes_before < $5 THEN body END AS body FROM (
    SELECT m.*, sum(length(m.body)) OVER (ORDER BY k.place, m.number) - length(m.body) AS bytes_before
    FROM unnest($1::text[], $2::text[], $3::bigint[]) WITH ORDINALITY AS k (store_id, conversation_id, after, place)
    CROSS JOIN LATERAL (
        SELECT e.store_id, e.conversation_id, e.number, e.body FROM job_store.messages AS e
        WHERE e.store_id = k.store_id AND e.conversation_id = k.conversation_id AND e.number > k.after
        ORDER BY e.number LIMIT $4
    ) AS m
) AS sized
ORDER BY store_id, conversation_id, number
"""
# Lock only rows that are unchanged since they were read: otherwise emptied messages could be found. Rows that a writer
# has locked are skipped.
_LOCK: Final = """
SELECT c.store_id, c.conversation_id FROM job_store.conversations AS c
JOIN unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::text[], $6::text[])
    AS k (store_id, conversation_id, user_id, searched_number, title, model_title)
USING (store_id, conversation_id, user_id, searched_number, title, model_title)
FOR UPDATE OF c SKIP LOCKED
"""
# Skip messages that have since been removed.
_WORDS: Final = """
INSERT INTO job_store.conversation_words AS w (store_id, conversation_id, number, words)
SELECT k.store_id, k.conversation_id, k.number, array_to_tsvector(string_to_array(k.words, ' '))
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::text[]) AS k (store_id, conversation_id, number, words)
WHERE k.number = 0 OR EXISTS (
    SELECT FROM job_store.messages AS m
    WHERE m.store_id = k.store_id AND m.conversation_id = k.conversation_id AND m.number = k.number
)
ON CONFLICT (store_id, conversation_id, number) DO UPDATE SET words = excluded.words
"""
_TAKEN: Final = """
UPDATE job_store.conversations AS c SET searched_number = k.searched_number, searched_title = c.title
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS k (store_id, conversation_id, searched_number)
WHERE c.store_id = k.store_id AND c.conversation_id = k.conversation_id
"""
_MESSAGES_MAX: Final = 20
_BYTES_MAX: Final = 1024 * 1024

_Key: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    due: Record
    words: Mapping[int, str]
    searched_number: int


class PostgresSearchIndex(DatabaseAdapter):
    async def index_new(self, *, conversations_max: int) -> int:
        """Index new messages and titles of some conversations. Return the number of conversations indexed.

        Several replicas may run this concurrently. Messages that have since been removed or emptied are not indexed.
        """
        due = await self._database.fetch(_DUE, conversations_max)
        if not due:
            return 0
        keys = [list(column) for column in zip(*((r["store_id"], r["conversation_id"]) for r in due), strict=True)]
        after = [record["searched_number"] for record in due]
        messages = defaultdict[_Key, list[Record]](list)
        for record in await self._database.fetch(_MESSAGES, *keys, after, _MESSAGES_MAX, _BYTES_MAX):
            messages[record["store_id"], record["conversation_id"]].append(record)
        read = [await self._read(record, messages[_key(record)]) for record in due]
        async with self._database.transaction() as connection:
            return await _store(connection, [each for each in read if each is not None])

    async def _read(self, due: Record, messages: Sequence[Record]) -> _Read | None:
        """Return the words of part of a conversation, or None if none of its messages fits into the batch."""
        whole = [record for record in messages if record["body"] is not None]
        has_new_title = due["title"] != due["searched_title"]
        if not whole and messages and not has_new_title:
            return None
        is_all = len(whole) == len(messages) < _MESSAGES_MAX
        last = whole[-1]["number"] if whole else due["searched_number"]
        owner = mark(due["store_id"], due["user_id"])
        found = {0: _marked(owner, due["title"] or due["model_title"])} if has_new_title else {}
        for record in whole:
            # Unreadable messages are not indexed.
            (text,) = read_each("message", [record["body"]], text_of, lambda _: _key(due)) or [""]
            found[record["number"]] = _marked(owner, text)
            await asyncio.sleep(0)  # Yield to other tasks after each text.
        return _Read(due=due, words=found, searched_number=due["last_number"] if is_all else last)


async def put_title(
    connection: Connection, store_id: StoreId, conversation_id: ConversationId, user_id: UserId, title: str
) -> None:
    """Index a conversation under its model-generated title. The conversation must be locked."""
    found = _marked(mark(store_id, user_id), title)
    await connection.execute(_WORDS, [store_id], [conversation_id], [0], [found])


async def _store(connection: Connection, read: Sequence[_Read]) -> int:
    seen = ("store_id", "conversation_id", "user_id", "searched_number", "title", "model_title")
    locked = {_key(r) for r in await connection.fetch(_LOCK, *([each.due[name] for each in read] for name in seen))}
    taken = [each for each in read if _key(each.due) in locked]
    # An empty title replaces the previous one.
    new = [(each, number, text) for each in taken for number, text in each.words.items() if text or number == 0]
    found = [(*_key(each.due), number, text) for each, number, text in new]
    if found:
        await connection.execute(_WORDS, *map(list, zip(*found, strict=True)))
    if taken:
        reached = [(*_key(each.due), each.searched_number) for each in taken]
        await connection.execute(_TAKEN, *map(list, zip(*reached, strict=True)))
    return len(taken)


def _key(record: Any) -> _Key:
    return record["store_id"], record["conversation_id"]


def _marked(owner: str, text: str) -> str:
    return " ".join(f"{owner}{word}" for word in words(text))
