"""Stores tool definitions and their versions in PostgreSQL."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import asyncpg

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.strict_json import loads
from pawl.errors import ToolExists, ToolNotFound
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.tool_registry.rules.registering import (
    FRONT_END,
    SOURCE,
    check_not_laxer,
    check_owner,
    check_quota,
    check_source,
)
from pawl.tools.rules.definition import (
    ToolDefinition,
    ToolVersion,
    can_exist,
    decode_definition,
    definition_hash,
    encode_definition,
)

_LOADED: Final = StoreId("")
_DEFINITION_BYTES_MAX: Final = 1024 * 1024

_LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('tool_registry.tools'), hashtext($1))"
_BY_HASH: Final = """
SELECT * FROM tool_registry.tool_versions
WHERE store_id = $1 AND name = $2 AND definition_hash = $3 ORDER BY version DESC LIMIT 1
"""
_INSERT: Final = """
INSERT INTO tool_registry.tool_versions (store_id, name, version, definition, definition_hash, source, binding, user_id)
SELECT $1, $2, coalesce(max(version), 0) + 1, $3, $4, $5, $6, $7
FROM tool_registry.tool_versions WHERE store_id = $1 AND name = $2
RETURNING *
"""
_CURRENT: Final = """
SELECT v.* FROM tool_registry.tools t JOIN tool_registry.tool_versions v USING (store_id, name, version)
WHERE store_id = $1 AND ($2::text[] IS NULL OR name = ANY ($2)) ORDER BY name COLLATE "C"
"""
_SET_CURRENT: Final = """
INSERT INTO tool_registry.tools (store_id, name, version) VALUES ($1, $2, $3)
ON CONFLICT (store_id, name) DO UPDATE SET version = excluded.version
"""
_VERSION: Final = "SELECT * FROM tool_registry.tool_versions WHERE store_id = $1 AND name = $2 AND version = $3"
_NEWEST: Final = """
SELECT * FROM tool_registry.tool_versions WHERE store_id = $1 AND name = $2 ORDER BY version DESC LIMIT 1
"""
_COUNT: Final = """
SELECT count(*) AS of_store, count(*) FILTER (WHERE v.user_id = $2) AS of_user
FROM tool_registry.tools t JOIN tool_registry.tool_versions v USING (store_id, name, version)
WHERE store_id = $1 AND split_part(v.source, ':', 1) = $3
"""
_UNREGISTER: Final = "DELETE FROM tool_registry.tools WHERE store_id = $1 AND name = $2 RETURNING name"


class PostgresToolRepository(DatabaseAdapter):
    """Durable tool definitions. Versions never change once they are assigned."""

    async def adopt(self, source: str, definitions: Sequence[ToolDefinition]) -> Sequence[ToolVersion]:
        """Return the version of each loaded definition, in order.

        A known definition gets the same version in every process, and a new definition gets the next version. Atomic,
        and safe to call from several processes concurrently.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, _LOADED)
            return [await self._adopt_one(connection, source, definition) for definition in definitions]

    async def register(
        self,
        store_id: StoreId,
        definition: ToolDefinition,
        *,
        replace: bool,
        source: str,
        binding: bytes = b"",
        registrant: Principal = SOURCE,
    ) -> ToolVersion:
        """Register a store's tool durably. Registering the same definition, source and binding again has no effect.

        Atomic, including the checks of `rules.registering`.

        Raises:
            ToolExists: The name belongs to another source, or it has another definition and `replace` is not set.
            PermissionDenied: The registrant may not replace the tool, or not with this definition.
            InvalidField: The registrant's or the store's quota is exhausted.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, store_id)
            current = await connection.fetchrow(_CURRENT, store_id, [definition.name])
            if current is not None:
                check_source(_version(current), source, registrant)
                known = (current["definition_hash"], current["source"], current["binding"])
                if known == (definition_hash(definition), source, binding):
                    return _version(current)
                if not replace:
                    raise ToolExists(
                        f"{definition.name!r} already exists with a different definition"
                        f" (version {current['version']}); set replace to create a new version"
                    )
                if source == FRONT_END:
                    check_owner(_version(current), registrant)
            else:
                await self._check_quota(connection, store_id, source, registrant)
            newest = await connection.fetchrow(_NEWEST, store_id, definition.name)
            check_not_laxer(definition, None if newest is None else _version(newest), registrant)
            user_id = registrant.user_id
            stored = await self._insert(connection, store_id, definition, source, binding=binding, user_id=user_id)
            await connection.execute(_SET_CURRENT, store_id, definition.name, stored.version)
            return stored

    async def unregister(self, store_id: StoreId, name: str) -> None:
        """Unregister a store's tool. Its versions remain readable.

        Raises:
            ToolNotFound: The store has no such tool.
        """
        async with self._database.acquire() as connection:
            if not can_exist(name) or await connection.fetchval(_UNREGISTER, store_id, name) is None:
                raise ToolNotFound(tool_name=name)

    async def current(self, store_id: StoreId, names: Collection[str] | None = None) -> Sequence[ToolVersion]:
        """Return the current versions of a store's tools, sorted by name. If `names` is None, return all of them."""
        asked = None if names is None else list(filter(can_exist, names))
        rows = await self._database.fetch(_CURRENT, store_id, asked)
        return [_version(row) for row in rows]

    async def version(self, store_id: StoreId, name: str, version: int) -> ToolVersion | None:
        """Return any version of a tool, or None if it does not exist. For loaded tools, `store_id` is empty."""
        if not can_exist(name, version):
            return None
        row = await self._database.fetchrow(_VERSION, store_id, name, version)
        return None if row is None else _version(row)

    async def _adopt_one(self, connection: Connection, source: str, definition: ToolDefinition) -> ToolVersion:
        known = await connection.fetchrow(_BY_HASH, _LOADED, definition.name, definition_hash(definition))
        if known is not None:
            return _version(known)
        return await self._insert(connection, _LOADED, definition, source)

    async def _check_quota(self, connection: Connection, store_id: StoreId, source: str, registrant: Principal) -> None:
        kind = source.partition(":")[0]
        (row,) = await connection.fetch(_COUNT, store_id, registrant.user_id, kind)
        check_quota(kind, registrant, of_user=row["of_user"], of_store=row["of_store"])

    async def _insert(
        self,
        connection: Connection,
        store_id: StoreId,
        definition: ToolDefinition,
        source: str,
        *,
        binding: bytes = b"",
        user_id: UserId = UserId(""),
    ) -> ToolVersion:
        (row,) = await connection.fetch(
            _INSERT,
            store_id,
            definition.name,
            encode_definition(definition),
            definition_hash(definition),
            source,
            binding,
            user_id,
        )
        return _version(row)


def _version(row: asyncpg.Record) -> ToolVersion:
    return ToolVersion(
        store_id=row["store_id"],
        definition=decode_definition(loads(row["definition"], bytes_max=_DEFINITION_BYTES_MAX)),
        version=row["version"],
        source=row["source"],
        create_time=row["created_at"].timestamp(),
        binding=row["binding"],
        user_id=row["user_id"],
    )
