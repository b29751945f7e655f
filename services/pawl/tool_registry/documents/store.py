"""Stores documents in PostgreSQL, with full-text search."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import asyncpg

from pawl.chassis.ids import StoreId, UserId
from pawl.errors import DocumentNotFound, TooLarge
from pawl.server.db.database import DatabaseAdapter
from pawl.tool_registry.documents.rules import (
    DOCUMENTS_MAX,
    STORE_BYTES_MAX,
    STORE_OWNER,
    Document,
    Hit,
    check_document,
    check_name,
    parts_of,
)

_COLUMNS: Final = """d.owner_id, d.name, d.language, d.text_bytes, d.text_sha256,
    extract(epoch FROM d.created_at)::float8 AS create_time, extract(epoch FROM d.updated_at)::float8 AS update_time"""
# A lexeme containing spaces, which never occurs in any text.
_OWNER_WORD: Final = "'owner ' || {store} || ' ' || {owner}"

_LOCK_STORE: Final = "SELECT pg_advisory_xact_lock(hashtextextended('tool_registry.documents ' || $1, 0))"
_FOUND: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.documents d WHERE store_id = $1 AND owner_id = ANY ($2::text[]) AND name = $3
ORDER BY owner_id
"""  # noqa: S608  # constants only
_ROOM: Final = """
SELECT count(*) AS documents, coalesce(sum(text_bytes), 0)::bigint AS bytes FROM tool_registry.documents
WHERE store_id = $1 AND (owner_id, name) <> ($2, $3)
"""
_WRITE: Final = f"""
INSERT INTO tool_registry.documents AS d (store_id, owner_id, name, language, text_bytes, text_sha256)
VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT (store_id, owner_id, name) DO UPDATE SET language = excluded.language, text_bytes = excluded.text_bytes,
    text_sha256 = excluded.text_sha256, updated_at = excluded.updated_at
RETURNING {_COLUMNS}
"""  # noqa: S608  # constants only
_CLEAR_PARTS: Final = "DELETE FROM tool_registry.document_parts WHERE store_id = $1 AND owner_id = $2 AND name = $3"
_WRITE_PART: Final = f"""
INSERT INTO tool_registry.document_parts
    (store_id, owner_id, name, number, byte_offset, content, language, search)
VALUES ($1, $2, $3, $4, $5, $6, $7,
    to_tsvector($7::text::regconfig, $6)
        || array_to_tsvector(ARRAY[{_OWNER_WORD.format(store="$1::text", owner="$2::text")}]))
"""  # noqa: S608  # constants only
_DELETE: Final = "DELETE FROM tool_registry.documents WHERE store_id = $1 AND owner_id = $2 AND name = $3 RETURNING 1"
_PARTS: Final = """
SELECT content FROM tool_registry.document_parts WHERE store_id = $1 AND owner_id = $2 AND name = $3 ORDER BY number
"""
_AFTER: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.documents d
WHERE store_id = $1 AND owner_id = ANY ($2::text[])
    AND (name > $3 OR (name = $3 AND ($4::text IS NULL OR owner_id > $4)))
ORDER BY name, owner_id LIMIT $5
"""  # noqa: S608  # constants only
# The query is stemmed differently for each language. A query that contains only stop words has no matches.
_SEARCH: Final = f"""
WITH asked AS MATERIALIZED (
    SELECT language, query, query && (
        quote_literal({_OWNER_WORD.format(store="$1::text", owner="''")})::tsquery
        || quote_literal({_OWNER_WORD.format(store="$1::text", owner="$2::text")})::tsquery) AS visible
    FROM (
        SELECT DISTINCT language, websearch_to_tsquery(language::regconfig, $3) AS query
        FROM tool_registry.documents WHERE store_id = $1 AND owner_id IN ('', $2)) q
    WHERE numnode(query) > 0),
found AS (
    SELECT DISTINCT ON (p.owner_id, p.name) p.owner_id, p.name, p.number, p.byte_offset, p.content, p.language, a.query,
        ts_rank_cd(p.search, a.query, 1) AS rank
    FROM asked a JOIN tool_registry.document_parts p
        ON p.search @@ a.visible AND p.language = a.language
        AND p.store_id = $1 AND p.owner_id IN ('', $2)
    ORDER BY p.owner_id, p.name, rank DESC, p.number),
best AS (SELECT * FROM found ORDER BY rank DESC, name, owner_id LIMIT $4)
SELECT {_COLUMNS}, b.byte_offset, b.content, ts_headline(b.language::regconfig, b.content, b.query, $5) AS headline
FROM best b JOIN tool_registry.documents d ON d.store_id = $1 AND d.owner_id = b.owner_id AND d.name = b.name
ORDER BY b.rank DESC, b.name, b.owner_id
"""  # noqa: S608  # constants only

_START, _STOP, _BETWEEN = "\x02", "\x03", "\x04"
_HEADLINE: Final = (
    f'StartSel="{_START}", StopSel="{_STOP}", FragmentDelimiter="{_BETWEEN}"'
    ", MaxFragments=3, MaxWords=40, MinWords=15, ShortWord=0"
)


class PostgresDocumentRepository(DatabaseAdapter):
    """Durable documents owned by stores and users. An owner is a user or STORE_OWNER."""

    async def put(
        self, store_id: StoreId, owner_id: UserId, name: str, text: str, language: str
    ) -> tuple[Document, bool]:
        """Create or replace a document. Return the document and whether it is new. Atomic and idempotent.

        Raises:
            InvalidField: The name, the text or the language is invalid.
            TooLarge: The text is too large, or the store's limit on documents or bytes is reached.
        """
        check_document(name, text, language)
        key = (store_id, owner_id, name)
        content = text.encode()
        digest = hashlib.sha256(content).hexdigest()
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK_STORE, store_id)
            earlier = await connection.fetchrow(_FOUND, store_id, [owner_id], name)
            if earlier is not None and (earlier["text_sha256"], earlier["language"]) == (digest, language):
                return Document(**earlier), False
            (room,) = await connection.fetch(_ROOM, *key)
            if room["documents"] >= DOCUMENTS_MAX:
                raise TooLarge(f"a store can have at most {DOCUMENTS_MAX} documents; delete some first")
            if room["bytes"] + len(content) > STORE_BYTES_MAX:
                raise TooLarge(
                    f"a store's documents can be at most {STORE_BYTES_MAX} bytes in total; delete some first"
                )
            (written,) = await connection.fetch(_WRITE, *key, language, len(content), digest)
            await connection.execute(_CLEAR_PARTS, *key)
            parts = [(*key, number, *part, language) for number, part in enumerate(parts_of(text))]
            await connection.executemany(_WRITE_PART, parts)
        return Document(**written), earlier is None

    async def delete(self, store_id: StoreId, owner_id: UserId, name: str) -> bool:
        """Delete a document. Return whether it existed."""
        return await self._database.fetchval(_DELETE, store_id, owner_id, name) is not None

    async def find(self, store_id: StoreId, user_id: UserId, name: str) -> Sequence[Document]:
        """Return the documents with this name that a user can see.

        If the store has one, it comes first.
        """
        return [Document(**row) for row in await self._database.fetch(_FOUND, store_id, [STORE_OWNER, user_id], name)]

    async def text(self, store_id: StoreId, owner_id: UserId, name: str) -> str | None:
        """Return the text of a document, or None if it does not exist."""
        async with self._database.transaction() as connection:
            if not await connection.fetch(_FOUND, store_id, [owner_id], name):
                return None
            # One statement, so that all parts come from the same version.
            return "".join(row["content"] for row in await connection.fetch(_PARTS, store_id, owner_id, name))

    async def read(self, store_id: StoreId, user_id: UserId, *, shared: bool, name: str) -> tuple[Document, str]:
        """Return a document that a user can see, including its text.

        Raises:
            DocumentNotFound: The owner has no document with that name.
            InvalidField: The name is invalid.
        """
        check_name(name)
        for document in await self.find(store_id, user_id, name):
            if document.is_shared is shared:
                text = await self.text(store_id, document.owner_id, name)
                if text is not None:
                    return document, text
        raise DocumentNotFound

    async def after(
        self, store_id: StoreId, user_id: UserId, name: str, owner_id: UserId | None, most: int
    ) -> Sequence[Document]:
        """Return the documents that a user can see, ordered by name and owner, starting after a position.

        If `owner_id` is None, documents with the name `name` are included.
        """
        rows = await self._database.fetch(_AFTER, store_id, [STORE_OWNER, user_id], name, owner_id, most)
        return [Document(**row) for row in rows]

    async def search(self, store_id: StoreId, user_id: UserId, query: str, most: int) -> Sequence[Hit]:
        """Return matching documents that a user can see. The best matches come first.

        The query uses web search syntax: words, "quoted phrases", `or` between alternatives, and `-` before excluded
        words.
        """
        rows = await self._database.fetch(_SEARCH, store_id, user_id, query, most, _HEADLINE)
        return [_hit(row) for row in rows]


def _hit(row: asyncpg.Record) -> Hit:
    fields = dict(row)
    byte_offset, content, headline = (fields.pop(name) for name in ("byte_offset", "content", "headline"))
    snippets = headline.split(_BETWEEN)
    first = snippets[0].replace(_START, "").replace(_STOP, "")
    # The snippet may not occur in the text, because ts_headline removes tags.
    before = content[: max(content.find(first), 0)]
    return Hit(
        document=Document(**fields),
        offset=byte_offset + len(before.encode()),
        snippets=tuple(snippet.replace(_START, "**").replace(_STOP, "**").strip() for snippet in snippets),
    )
