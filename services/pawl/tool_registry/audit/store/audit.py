"""The audit chain and its digest secrets in PostgreSQL.

A secret is created with a conversation's first entry and destroyed when the conversation is erased.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, Final, TypeAlias

import asyncpg

from pawl.chassis.ids import StoreId
from pawl.server.db.database import Connection, Database
from pawl.tool.v1 import audit_pb2
from pawl.tool_registry.audit.rules import AuditDraft, AuditEntry, AuditFilter, Head, chained, sealed

_Key: TypeAlias = tuple[str, str]

# Reads secrets, and creates those that are missing. The commit of the entry that uses a secret also syncs it to disk.
# Does not return a row that another process creates concurrently; the next read does.
_FIND_OR_MAKE: Final = """
WITH wanted AS (
    SELECT k.* FROM unnest($1::text[], $2::text[], $3::bytea[]) AS k (store_id, key_id, secret),
        set_config('synchronous_commit', 'off', true)
), made AS (
    INSERT INTO tool_registry.audit_keys (store_id, key_id, secret) SELECT * FROM wanted ON CONFLICT DO NOTHING
    RETURNING store_id, key_id, secret
)
SELECT store_id, key_id, secret FROM made
UNION ALL
SELECT store_id, key_id, a.secret FROM tool_registry.audit_keys AS a JOIN wanted USING (store_id, key_id)
"""
_BYTES: Final = 32
_KEPT_MAX: Final = 10_000
# How long a process may continue to use a secret after it was destroyed.
_FRESH_SECONDS: Final = 60.0


class AuditSecrets:
    """Computes digests keyed with the secrets of their conversations. Caches the secrets for a minute."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: dict[_Key, tuple[float, bytes]] = {}

    async def seal(self, drafts: Sequence[AuditDraft]) -> Sequence[AuditDraft]:
        """Return the entries with keyed digests. For an erased conversation, a random key is used."""
        wanted = {(draft.store_id, draft.key_id): None for draft in drafts}
        found = await self._of(wanted)
        return [sealed(draft, found[draft.store_id, draft.key_id]) for draft in drafts]

    async def _of(self, wanted: Iterable[_Key]) -> dict[_Key, bytes]:
        now = time.monotonic()
        found = {
            key: cached[1] for key in wanted if (cached := self._kept.get(key)) and now - cached[0] < _FRESH_SECONDS
        }
        if missing := [key for key in wanted if key not in found]:
            read = await self._read(missing)
            if len(self._kept) + len(read) > _KEPT_MAX:
                self._kept.clear()
            self._kept |= {key: (now, secret) for key, secret in read.items() if secret is not None}
            # An erased conversation gets a new random key each time.
            found |= {key: read[key] or secrets.token_bytes(_BYTES) for key in missing}
        return found

    async def _read(self, keys: Sequence[_Key]) -> dict[_Key, bytes | None]:
        """Return the secrets of conversations, and create the missing ones. A destroyed secret is None."""
        found: dict[_Key, bytes | None] = {}
        while missing := sorted(set(keys) - found.keys()):
            stores, key_ids = map(list, zip(*missing, strict=True))
            new = [secrets.token_bytes(_BYTES) for _ in missing]
            rows = await self._database.fetch(_FIND_OR_MAKE, stores, key_ids, new)
            found |= {(row["store_id"], row["key_id"]): row["secret"] for row in rows}
        return found


_HEADS_MAX: Final = 10_000
_CONFLICTS_MAX: Final = 3
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

_DRAFT: Final = (
    "store_id, kind, user_id, run_id, call_id, tool_name, tool_version, verdict, reason, by_user_id, arguments_sha256,"
    " result_sha256, result_bytes, duration_us, credential_id, delegate_user_id, by_credential_id, by_delegate_user_id,"
    " agent_name"
)
_COLUMNS: Final = f"{_DRAFT}, recorded_at, seq, prev_hash, hash"
_ARRAYS: Final = """$1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::integer[], $8::text[],
    $9::text[], $10::text[], $11::text[], $12::text[], $13::bigint[], $14::bigint[], $15::text[], $16::text[],
    $17::text[], $18::text[], $19::text[], $20::timestamptz[], $21::bigint[], $22::text[], $23::text[]"""
_INSERT: Final = f"""
INSERT INTO tool_registry.audit ({_COLUMNS}) SELECT * FROM unnest({_ARRAYS})
"""  # noqa: S608  # constants only
# Moves the heads and writes the entries in one statement, if no other process has moved any of the heads.
_APPEND: Final = f"""
WITH moves AS (
    SELECT * FROM unnest($24::text[], $25::bigint[], $26::text[], $27::bigint[], $28::text[])
        AS m (store_id, old_seq, old_hash, seq, hash)
), here AS (
    SELECT h.store_id FROM tool_registry.audit_heads h JOIN moves m USING (store_id)
    WHERE h.seq = m.old_seq AND h.hash = m.old_hash ORDER BY h.store_id FOR UPDATE OF h
), moved AS (
    UPDATE tool_registry.audit_heads h SET seq = m.seq, hash = m.hash FROM moves m
    WHERE h.store_id = m.store_id AND (SELECT count(*) FROM here) = (SELECT count(*) FROM moves)
    RETURNING h.store_id
)
INSERT INTO tool_registry.audit ({_COLUMNS})
SELECT * FROM unnest({_ARRAYS}) WHERE (SELECT count(*) FROM moved) = (SELECT count(*) FROM moves)
"""  # noqa: S608  # constants only
_CREATE_HEADS: Final = """
INSERT INTO tool_registry.audit_heads (store_id, seq, hash) SELECT s, 0, '' FROM unnest($1::text[]) s
ON CONFLICT DO NOTHING
"""
_LOCK_HEADS: Final = """
SELECT store_id, seq, hash FROM tool_registry.audit_heads WHERE store_id = ANY ($1) ORDER BY store_id FOR UPDATE
"""
_MOVE_HEADS: Final = """
UPDATE tool_registry.audit_heads h SET seq = m.seq, hash = m.hash
FROM unnest($1::text[], $2::bigint[], $3::text[]) AS m (store_id, seq, hash) WHERE h.store_id = m.store_id
"""
# Each half repeats the condition of its index, and each report has its own subquery, because a join might scan the
# whole table.
_REPORTED: Final = "kind, store_id, call_id, verdict, by_user_id, arguments_sha256"
_SAME_REPORT: Final = " AND ".join(f"a.{each} = r.{each}" for each in _REPORTED.split(", "))
_KNOWN_REPORTS: Final = f"""
WITH reports AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[]) AS r ({_REPORTED})
)
SELECT {_REPORTED} FROM reports AS r WHERE EXISTS (
    SELECT FROM tool_registry.audit a WHERE a.kind = 'DECIDED' AND {_SAME_REPORT} OFFSET 0)
UNION ALL
SELECT {_REPORTED} FROM reports AS r WHERE EXISTS (
    SELECT FROM tool_registry.audit a WHERE a.kind = 'RETURNED' AND a.by_user_id <> '' AND {_SAME_REPORT} OFFSET 0)
"""  # noqa: S608  # constants only
_report_key: Final = attrgetter(*_REPORTED.split(", "))
_of_draft: Final = attrgetter(*_DRAFT.split(", "))
_HEAD: Final = "SELECT seq, hash FROM tool_registry.audit_heads WHERE store_id = $1"
_PAGE: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.audit
WHERE store_id = $1 AND ($2::bigint IS NULL OR seq > $2) AND seq <= $3 ORDER BY seq LIMIT $4
"""  # noqa: S608  # constants only
_BEYOND: Final = """
SELECT min(seq) FROM tool_registry.audit WHERE store_id = $1
    AND seq > coalesce((SELECT seq FROM tool_registry.audit_heads WHERE store_id = $1), 0)
"""
_WANTED: Final = """store_id = $1 AND ($2 = '' OR run_id = $2) AND ($3 = '' OR call_id = $3)
    AND ($4 = '' OR tool_name = $4) AND ($5 = '' OR user_id = $5) AND ($6 = '' OR kind = $6)
    AND ($7::timestamptz IS NULL OR recorded_at >= $7) AND ($8::timestamptz IS NULL OR recorded_at < $8)
    AND ($9 = '' OR agent_name = $9)"""
_LIST: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.audit WHERE {_WANTED} AND ($10::bigint IS NULL OR seq < $10)
ORDER BY seq DESC LIMIT $11
"""  # noqa: S608  # constants only
_ENDED: Final = "kind = 'RETURNED' AND reason NOT IN ('CACHED', 'LATE')"
_FIGURES: Final = f"""
SELECT CASE WHEN $10 THEN agent_name ELSE '' END AS agent_name, tool_name,
    count(*) FILTER (WHERE {_ENDED}) AS execution_count,
    count(*) FILTER (WHERE {_ENDED} AND verdict <> 'SUCCEEDED') AS error_count,
    count(*) FILTER (WHERE kind = 'RETURNED' AND reason = 'CACHED') AS cached_count,
    coalesce(percentile_disc(0.5) WITHIN GROUP (ORDER BY duration_us) FILTER (WHERE {_ENDED}), 0) / 1e6 AS p50_seconds,
    coalesce(percentile_disc(0.95) WITHIN GROUP (ORDER BY duration_us) FILTER (WHERE {_ENDED}), 0) / 1e6
        AS p95_seconds,
    coalesce(sum(result_bytes) FILTER (WHERE kind = 'RETURNED'), 0)::bigint AS result_bytes,
    count(DISTINCT call_id) FILTER (WHERE kind = 'PROPOSED' AND verdict = 'APPROVE') AS approval_asked_count,
    count(DISTINCT call_id) FILTER (WHERE kind = 'DECIDED' AND verdict = 'APPROVE') AS approved_count,
    count(DISTINCT call_id) FILTER (WHERE kind = 'DECIDED' AND verdict = 'EDIT') AS edited_count,
    count(DISTINCT call_id) FILTER (WHERE kind = 'DECIDED' AND verdict = 'REJECT') AS rejected_count
FROM tool_registry.audit WHERE {_WANTED} GROUP BY 1, tool_name ORDER BY 1, tool_name
"""  # noqa: S608  # constants only


class PostgresAuditLog:
    """The audit chains of all stores. Durable and shared by all replicas.

    It caches the heads of the chains that it has written to, so that an append takes a single statement.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._heads: dict[StoreId, Head] = {}
        self._secrets = AuditSecrets(database)

    async def append(self, drafts: Sequence[AuditDraft]) -> frozenset[StoreId]:
        """Append entries to their chains, in order. Return the stores whose chains refuse entries.

        A chain that was tampered with refuses all entries. Other stores are not affected. Reports of decisions and
        results that were already recorded are skipped.

        Raises:
            DependencyUnavailable: The entries may or may not have been written.
        """
        return await self._append(await self._secrets.seal(drafts))

    async def _append(self, drafts: Sequence[AuditDraft]) -> frozenset[StoreId]:
        heads = {draft.store_id: self._heads.get(draft.store_id) for draft in drafts}
        known = {store_id: head for store_id, head in heads.items() if head is not None}
        is_simple = len(known) == len(heads) and not any(draft.is_reported for draft in drafts)
        if is_simple and await self._append_at(known, drafts):
            return frozenset()
        for _ in range(_CONFLICTS_MAX):
            try:
                await self._append_locked(sorted(heads), drafts)
            except asyncpg.UniqueViolationError:
                # Another replica wrote the same report, or a row already exists at the next entry's position.
                continue
            return frozenset()
        if len(heads) == 1:
            return frozenset(heads)
        refused = frozenset[StoreId]()
        for store_id in sorted(heads):
            refused |= await self._append([draft for draft in drafts if draft.store_id == store_id])
        return refused

    async def head(self, store_id: StoreId) -> Head:
        row = await self._database.fetchrow(_HEAD, store_id)
        return Head() if row is None else Head(seq=row["seq"], hash=row["hash"])

    async def page(
        self, store_id: StoreId, *, after_seq: int | None, up_to_seq: int, rows_max: int
    ) -> list[AuditEntry]:
        """Return entries in order, starting after `after_seq` or, if that is None, at the beginning."""
        rows = await self._database.fetch(_PAGE, store_id, after_seq, up_to_seq, rows_max)
        return list(map(_entry, rows))

    async def beyond_head(self, store_id: StoreId) -> int:
        """Return the number of the first entry after the recorded head, or 0 if there is no such entry."""
        return await self._database.fetchval(_BEYOND, store_id) or 0

    async def listed(self, wanted: AuditFilter, *, before_seq: int | None, rows_max: int) -> list[AuditEntry]:
        """Return matching entries, newest first."""
        rows = await self._database.fetch(_LIST, *_filter(wanted), before_seq, rows_max)
        return list(map(_entry, rows))

    async def figures(self, wanted: AuditFilter, *, by_agent: bool) -> list[audit_pb2.ToolFigures]:
        """Return statistics for each tool or, with `by_agent`, for each agent and tool, sorted by name."""
        rows = await self._database.fetch(_FIGURES, *_filter(wanted), by_agent)
        return [audit_pb2.ToolFigures(**row) for row in rows]

    async def _append_at(self, heads: dict[StoreId, Head], drafts: Sequence[AuditDraft]) -> bool:
        """Append the entries unless another process has moved the heads. Return whether they were appended."""
        entries, moved = _after(heads, drafts)
        moves = [(store, heads[store].seq, heads[store].hash, head.seq, head.hash) for store, head in moved.items()]
        self._forget(heads)  # After any failure, it is unknown whether the heads have moved.
        with suppress(asyncpg.UniqueViolationError):
            tag = await self._database.execute(_APPEND, *_arrays(entries), *map(list, zip(*moves, strict=True)))
            if tag == f"INSERT 0 {len(entries)}":
                self._heads |= moved
                return True
        return False

    async def _append_locked(self, store_ids: list[StoreId], drafts: Sequence[AuditDraft]) -> None:
        self._forget(store_ids)
        async with self._database.transaction() as connection:
            await connection.execute(_CREATE_HEADS, store_ids)
            rows = await connection.fetch(_LOCK_HEADS, store_ids)
            heads = {row["store_id"]: Head(seq=row["seq"], hash=row["hash"]) for row in rows}
            new = await _without_known_reports(connection, drafts)
            entries, moved = _after(heads, new)
            if entries:
                await connection.execute(_INSERT, *_arrays(entries))
                moves = [(store, head.seq, head.hash) for store, head in moved.items()]
                await connection.execute(_MOVE_HEADS, *map(list, zip(*moves, strict=True)))
        if len(self._heads) < _HEADS_MAX:
            self._heads |= heads | moved

    def _forget(self, store_ids: Sequence[StoreId] | dict[StoreId, Head]) -> None:
        for store_id in store_ids:
            self._heads.pop(store_id, None)


def _after(heads: dict[StoreId, Head], drafts: Sequence[AuditDraft]) -> tuple[list[AuditEntry], dict[StoreId, Head]]:
    by_store: dict[StoreId, list[AuditDraft]] = {}
    for draft in drafts:
        by_store.setdefault(draft.store_id, []).append(draft)
    entries, moved = list[AuditEntry](), dict[StoreId, Head]()
    for store_id, its in by_store.items():
        new = chained(heads[store_id], its)
        entries += new
        moved[store_id] = Head(seq=new[-1].seq, hash=new[-1].hash)
    return entries, moved


async def _without_known_reports(connection: Connection, drafts: Sequence[AuditDraft]) -> list[AuditDraft]:
    reports = {_report_key(draft): draft for draft in drafts if draft.is_reported}
    if not reports:
        return list(drafts)
    rows = await connection.fetch(_KNOWN_REPORTS, *map(list, zip(*reports, strict=True)))
    for row in rows:
        del reports[tuple(row)]
    return [draft for draft in drafts if not draft.is_reported or reports.get(_report_key(draft)) is draft]


def _arrays(entries: Sequence[AuditEntry]) -> list[list[Any]]:
    rows = [
        (*_of_draft(one.draft), _EPOCH + one.draft.time_us * _MICROSECOND, one.seq, one.prev_hash, one.hash)
        for one in entries
    ]
    return list(map(list, zip(*rows, strict=True)))


def _entry(row: asyncpg.Record) -> AuditEntry:
    fields = dict(row)
    place = {name: fields.pop(name) for name in ("seq", "prev_hash", "hash")}
    time_us = (fields.pop("recorded_at") - _EPOCH) // _MICROSECOND
    return AuditEntry(draft=AuditDraft(**fields, time_us=time_us), **place)


def _filter(wanted: AuditFilter) -> list[Any]:
    return [
        wanted.store_id,
        wanted.run_id,
        wanted.call_id,
        wanted.tool_name,
        wanted.user_id,
        wanted.kind,
        wanted.since_time,
        wanted.before_time,
        wanted.agent_name,
    ]
