"""Stores settings and their changes in PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import asyncpg
import msgspec

from pawl.chassis.ids import CredentialId, RunKey, StoreId, UserId
from pawl.job_store.ledger.rules.rows import ConversationKey
from pawl.job_store.store_settings.rules import Layer, Settings
from pawl.server.db.database import DatabaseAdapter, affected
from pawl.values import RunState, WaitKind

# The statements are built only from constants in this module.
# ruff: noqa: S608

_LAYERS: Final = "SELECT settings, change FROM job_store.store_settings WHERE change > $1 ORDER BY change"
_OF_STORE: Final = "SELECT settings FROM job_store.store_settings WHERE store_id IN ('', $1)"
_LAST_CHANGE: Final = "SELECT coalesce(max(change), 0) FROM job_store.settings_changes"
# Changes are serial: each is checked against all earlier ones, and a reader that asks for later changes misses none.
_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('job_store.store_settings'))"
_ADD_CHANGE: Final = """
INSERT INTO job_store.settings_changes ("time", layer, store_id, before, after, user_id, credential_id)
VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING change
"""
_PUT: Final = """
INSERT INTO job_store.store_settings (layer, store_id, settings, change) VALUES ($1, $2, $3, $4)
ON CONFLICT (store_id, layer) DO UPDATE SET settings = excluded.settings, change = excluded.change
"""
_CHANGES: Final = """
SELECT change, "time", layer, store_id, before, after, user_id, credential_id
FROM job_store.settings_changes
WHERE change < $1 AND ($2::text IS NULL OR store_id = $2) ORDER BY change DESC LIMIT $3
"""


_STORES_WITH_OPEN_RUNS: Final = f"SELECT DISTINCT store_id FROM job_store.runs WHERE state < {RunState.COMPLETED.value}"
# Delegated runs are stopped by their parents. Jobs outlive theirs.
_RUNS_TO_CANCEL: Final = f"""
SELECT run_id, user_id, options FROM job_store.runs
WHERE store_id = $1 AND state < {RunState.COMPLETED.value} AND state <> {RunState.CANCELLING.value}
AND (parent_run_id = '' OR reports_to <> '') AND create_time < $2 AND run_id > $3
ORDER BY run_id LIMIT $4
"""


_WAKE: Final = f"""
WITH waiting AS MATERIALIZED (
    SELECT store_id, run_id FROM job_store.runs
    WHERE store_id = $1 AND state = {RunState.WAITING.value} AND worker_id IS NULL
    AND waits = ANY ($2::bytea[]) AND claim_at > now()
    ORDER BY store_id, run_id FOR UPDATE SKIP LOCKED
)
UPDATE job_store.runs AS r SET claim_at = now() FROM waiting AS w
WHERE r.store_id = w.store_id AND r.run_id = w.run_id
"""


_MODEL_SERVERS: Final = """
SELECT model_server FROM job_store.model_servers WHERE store_id = '' AND report_time > now() - interval '10 minutes'
"""


_WITH_NOTICES: Final = """
SELECT store_id, conversation_id FROM job_store.conversations
WHERE notices_pending + notices_entered > 0 AND user_id <> '' AND active_run_id IS NULL
    AND (store_id, conversation_id) > ($1, $2)
ORDER BY store_id, conversation_id LIMIT $3
"""


# Hops from store to store through the primary key.
_STORES: Final = """
WITH RECURSIVE stores AS (
    SELECT min(store_id) AS store_id FROM job_store.conversations
    UNION ALL
    SELECT (SELECT min(c.store_id) FROM job_store.conversations AS c WHERE c.store_id > s.store_id)
    FROM stores AS s WHERE s.store_id IS NOT NULL
)
SELECT store_id FROM stores WHERE store_id IS NOT NULL
"""
# Large values are not read, because their sizes are in the rows.
_STORED_BYTES: Final = """
SELECT max(c.conversation_id) AS last_id, sum(m.bytes + r.bytes)::bigint AS bytes FROM (
    SELECT store_id, conversation_id FROM job_store.conversations
    WHERE store_id = $1 AND conversation_id > $2 ORDER BY conversation_id LIMIT $3
) AS c CROSS JOIN LATERAL (
    SELECT coalesce(sum(octet_length(body)), 0) AS bytes FROM job_store.messages AS m
    WHERE m.store_id = c.store_id AND m.conversation_id = c.conversation_id
) AS m CROSS JOIN LATERAL (
    SELECT coalesce(sum(e.bytes + k.bytes), 0) AS bytes FROM job_store.runs AS r CROSS JOIN LATERAL (
        SELECT coalesce(sum(octet_length(events)), 0) AS bytes FROM job_store.events AS e
        WHERE e.store_id = r.store_id AND e.run_id = r.run_id
    ) AS e CROSS JOIN LATERAL (
        SELECT coalesce(sum(octet_length(arguments) + coalesce(octet_length(result), 0)), 0) AS bytes
        FROM job_store.calls AS k WHERE k.store_id = r.store_id AND k.run_id = r.run_id
    ) AS k WHERE r.store_id = c.store_id AND r.conversation_id = c.conversation_id
) AS r
"""
_CONVERSATIONS_COUNTED: Final = 500


class OpenRun(NamedTuple):
    run: RunKey
    user_id: UserId
    options: bytes


class SettingsChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change to a layer, with the changed values before and after it."""

    change: int
    time: datetime
    layer: Layer
    store_id: StoreId
    before: Mapping[str, str]
    after: Mapping[str, str]
    user_id: UserId
    credential_id: CredentialId


class PostgresSettings(DatabaseAdapter):
    async def changed_layers(self, after_change: int) -> tuple[Sequence[Settings], int]:
        """Return the layers that changed after change number `after_change`, and the number of the last change.

        If `after_change` is 0, return all layers.
        """
        async with self._database.acquire() as connection:
            last_change: int = await connection.fetchval(_LAST_CHANGE)
            rows = [] if last_change == after_change else await connection.fetch(_LAYERS, after_change)
        return [_settings(row) for row in rows], max(last_change, *(row["change"] for row in rows), 0)

    async def update(
        self,
        store_id: StoreId,
        change: Callable[[Sequence[Settings], datetime], tuple[Settings, Settings]],
        *,
        only_check: bool,
    ) -> Settings:
        """Change a layer and record the change.

        `change` receives the layers that apply to the store, and the current time. It returns a pair: the layer being
        changed, as it was and as it will be.

        Raises:
            PawlError: Any error that `change` raises.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK)
            layers = [_settings(row) for row in await connection.fetch(_OF_STORE, store_id)]
            before, after = change(layers, await connection.fetchval("SELECT now()"))
            if only_check:
                return after
            texts = [_changed(before.texts, after.texts), _changed(after.texts, before.texts)]
            change_id = await connection.fetchval(
                _ADD_CHANGE,
                after.update_time,
                after.layer,
                after.store_id,
                *map(msgspec.json.encode, texts),
                after.update_user_id,
                after.update_credential_id,
            )
            await connection.execute(_PUT, after.layer, after.store_id, msgspec.json.encode(after), change_id)
        return after

    async def wake(self, store_id: StoreId, waits: Sequence[WaitKind]) -> int:
        """Let workers claim a store's runs that are waiting only for one of `waits`. Return the number of runs."""
        return affected(await self._database.execute(_WAKE, store_id, [bytes([each]) for each in waits]))

    async def model_servers(self) -> frozenset[str]:
        """Return the model servers that agent-loop processes have recently reported."""
        return frozenset(row["model_server"] for row in await self._database.fetch(_MODEL_SERVERS))

    async def stores_with_open_runs(self) -> Sequence[StoreId]:
        return [row["store_id"] for row in await self._database.fetch(_STORES_WITH_OPEN_RUNS)]

    async def stores(self) -> Sequence[StoreId]:
        """Return the stores that have conversations."""
        return [row["store_id"] for row in await self._database.fetch(_STORES)]

    async def stored_bytes(self, store_id: StoreId) -> int:
        """Return the total size in bytes of a store's messages, events, call arguments and call results."""
        size = 0
        last_id: str | None = ""
        while last_id is not None:
            row = (await self._database.fetch(_STORED_BYTES, store_id, last_id, _CONVERSATIONS_COUNTED))[0]
            size, last_id = size + (row["bytes"] or 0), row["last_id"]
        return size

    async def open_runs(
        self, store_id: StoreId, created_before: datetime, *, after_run: str, runs_max: int
    ) -> Sequence[OpenRun]:
        """Return the ids of open runs that are not being stopped."""
        rows = await self._database.fetch(_RUNS_TO_CANCEL, store_id, created_before, after_run, runs_max)
        return [OpenRun(RunKey(store_id, row["run_id"]), row["user_id"], row["options"]) for row in rows]

    async def conversations_with_notices(self, after: ConversationKey, *, rows_max: int) -> Sequence[ConversationKey]:
        """Return idle conversations that have job notices, sorted by store and id."""
        rows = await self._database.fetch(_WITH_NOTICES, after.store_id, after.conversation_id, rows_max)
        return [ConversationKey(row["store_id"], row["conversation_id"]) for row in rows]

    async def changes(self, store_id: StoreId | None, *, before: int, changes_max: int) -> Sequence[SettingsChange]:
        """Return changes numbered below `before`, newest first, for all layers or for one store's layers."""
        rows = await self._database.fetch(_CHANGES, before, store_id, changes_max)
        return [
            SettingsChange(
                **dict(row)
                | {"layer": Layer(row["layer"])}
                | {name: msgspec.json.decode(row[name], type=dict[str, str]) for name in ("before", "after")}
            )
            for row in rows
        ]


def _settings(row: asyncpg.Record) -> Settings:
    return msgspec.json.decode(row["settings"], type=Settings)


def _changed(texts: dict[str, str], others: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in texts.items() if others.get(name) != text}
