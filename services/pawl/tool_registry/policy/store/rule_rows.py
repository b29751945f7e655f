"""Stores rules in PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Final

import asyncpg
import msgspec

from pawl.chassis.ids import CallId, RequestId, StoreId, UserId
from pawl.errors import ConversationErased, RequestIdReused, RuleNotFound
from pawl.server.db.database import Connection, DatabaseAdapter
from pawl.tool_registry.policy.rules.patterns import ArgumentPattern
from pawl.tool_registry.policy.rules.rules import Rule, RuleEffect, RuleScope, canonical_terms, check_room

_STORED: Final = (
    "store_id, rule_id, effect, scope, scope_id, user_id, tool_name, items_max, includes_destructive, uses_max,"
    " tool_version, reason, name"
)
_COLUMNS: Final = f"""{_STORED}, arguments, uses, extract(epoch FROM created_at)::float8 AS create_time,
    coalesce(extract(epoch FROM expires_at), 0)::float8 AS expire_time,
    coalesce(extract(epoch FROM revoked_at), 0)::float8 AS revoke_time,
    revoked_by AS revoke_user_id, from_call_id AS call_id"""
_IN_FORCE: Final = """
revoked_at IS NULL AND (expires_at IS NULL OR expires_at > clock_timestamp()) AND (uses_max = 0 OR uses < uses_max)
"""
_OF_STORE: Final = "scope IN ('STORE', 'AGENT')"
_ADD: Final = f"""
INSERT INTO tool_registry.rules ({_STORED}, arguments, request_id, request_hash, expires_at, from_call_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
ON CONFLICT (store_id, user_id, request_id) WHERE request_id <> '' DO NOTHING RETURNING request_hash, {_COLUMNS}
"""  # noqa: S608  # constants
LOCK: Final = "SELECT pg_advisory_xact_lock(hashtext('tool_registry.rules'), hashtext($1))"
# Erasing a conversation destroys its secret permanently.
_IS_ERASED: Final = """
SELECT EXISTS (SELECT FROM tool_registry.audit_keys WHERE store_id = $1 AND key_id = $2 AND secret IS NULL)
OR EXISTS (SELECT FROM tool_registry.erased_runs WHERE store_id = $1 AND run_id = $2)
"""
_COUNT: Final = f"""
SELECT count(*) FILTER (WHERE {_OF_STORE}) AS of_store, count(*) FILTER (WHERE NOT {_OF_STORE}) AS of_users,
    count(*) FILTER (WHERE NOT {_OF_STORE} AND user_id = $2) AS of_user
FROM tool_registry.rules WHERE store_id = $1 AND {_IN_FORCE}
"""  # noqa: S608  # constants
_BY_REQUEST: Final = f"""
SELECT request_hash, {_COLUMNS} FROM tool_registry.rules WHERE store_id = $1 AND user_id = $2 AND request_id = $3
"""  # noqa: S608  # constants
_GET: Final = f"SELECT {_COLUMNS} FROM tool_registry.rules WHERE store_id = $1 AND rule_id = $2"  # noqa: S608
_ALL_IN_FORCE: Final = f"SELECT {_COLUMNS} FROM tool_registry.rules WHERE store_id = $1 AND {_IN_FORCE}"  # noqa: S608
_REVOKE: Final = f"""
UPDATE tool_registry.rules
SET revoked_at = coalesce(revoked_at, clock_timestamp()),
    revoked_by = CASE WHEN revoked_at IS NULL THEN $3 ELSE revoked_by END
WHERE store_id = $1 AND rule_id = $2 RETURNING {_COLUMNS}
"""  # noqa: S608
_LIST: Final = f"""
SELECT {_COLUMNS} FROM tool_registry.rules
WHERE store_id = $1 AND ($2 = '' OR user_id = $2 OR {_OF_STORE}) AND ($3 OR ({_IN_FORCE}))
  AND ($4 = '' OR rule_id < $4)
ORDER BY rule_id DESC LIMIT $5
"""  # noqa: S608  # constants
# Locks the rule first, so that only one of several concurrent calls gets the last use.
_USE: Final = f"""
WITH rule AS MATERIALIZED (
    SELECT store_id, rule_id, revoked_at, expires_at, uses, uses_max FROM tool_registry.rules
    WHERE store_id = $1 AND rule_id = $2 FOR UPDATE),
used AS (
    INSERT INTO tool_registry.rule_uses (store_id, rule_id, call_id)
    SELECT store_id, rule_id, $3 FROM rule WHERE {_IN_FORCE}
    ON CONFLICT DO NOTHING RETURNING true),
counted AS (
    UPDATE tool_registry.rules SET uses = uses + 1
    WHERE store_id = $1 AND rule_id = $2 AND EXISTS (SELECT FROM used) RETURNING true)
SELECT count(*) FROM counted
"""  # noqa: S608  # constants
_HAS_ALLOWED: Final = """
SELECT EXISTS (
    SELECT FROM tool_registry.rule_uses u JOIN tool_registry.rules r USING (store_id, rule_id)
    WHERE u.store_id = $1 AND u.rule_id = $2 AND u.call_id = $3
      AND r.revoked_at IS NULL AND (r.expires_at IS NULL OR r.expires_at > clock_timestamp()))
"""
_FORGET: Final = """
DELETE FROM tool_registry.rule_uses WHERE used_at < now() - make_interval(secs => $1)
"""

_stored: Final = attrgetter(*_STORED.split(", "))


class PostgresRuleRepository(DatabaseAdapter):
    """Stores rules and the calls that they have allowed. Durable and shared by all replicas."""

    async def add(self, rule: Rule, request_id: RequestId) -> Rule:
        """Store a rule and return it. For a repeated request, return the rule that the first request created.

        This is atomic, including `check_room`.

        Raises:
            RequestIdReused: The user has already used the request id for another rule.
            InvalidField: The limit on rules is reached.
            ConversationErased: The rule's conversation, or its run's conversation, was erased.
        """
        patterns = msgspec.msgpack.encode(rule.arguments)
        request_hash = hashlib.sha256(canonical_terms(rule)).digest()
        async with self._database.transaction() as connection:
            await connection.execute(LOCK, rule.store_id)
            if rule.is_of_conversation and await connection.fetchval(_IS_ERASED, rule.store_id, rule.scope_id):
                raise ConversationErased
            is_known = request_id and await connection.fetchrow(_BY_REQUEST, rule.store_id, rule.user_id, request_id)
            if not is_known:
                await self.check_room(rule, connection)
            row = await connection.fetchrow(
                _ADD,
                *_stored(rule),
                patterns,
                request_id,
                request_hash,
                datetime.fromtimestamp(rule.expire_time, UTC) if rule.expire_time else None,
                rule.call_id,
            )
            if row is None:
                row = await connection.fetchrow(_BY_REQUEST, rule.store_id, rule.user_id, request_id)
        if row is None or row["request_hash"] != request_hash:
            raise RequestIdReused
        return _rule(row)

    async def check_room(self, rule: Rule, within: Connection | None = None) -> None:
        (counts,) = await (within or self._database).fetch(_COUNT, rule.store_id, rule.user_id)
        check_room(rule, **dict(counts))

    async def is_erased(self, rule: Rule) -> bool:
        """Return whether the rule's conversation, or its run's conversation, was erased."""
        return bool(await self._database.fetchval(_IS_ERASED, rule.store_id, rule.scope_id))

    async def get(self, store_id: StoreId, rule_id: str) -> Rule | None:
        """Return a rule, whether or not it is in force, or None if it does not exist."""
        row = await self._database.fetchrow(_GET, store_id, rule_id)
        return None if row is None else _rule(row)

    async def is_made(self, store_id: StoreId, user_id: UserId, request_id: RequestId) -> bool:
        """Return whether the user's request has already created a rule."""
        return await self._database.fetchrow(_BY_REQUEST, store_id, user_id, request_id) is not None

    async def in_force(self, store_id: StoreId) -> Sequence[Rule]:
        return [_rule(row) for row in await self._database.fetch(_ALL_IN_FORCE, store_id)]

    async def revoke(self, store_id: StoreId, rule_id: str, user_id: UserId) -> Rule:
        """Revoke a rule. Has no effect if the rule is already revoked.

        Raises:
            RuleNotFound: The rule does not exist.
        """
        row = await self._database.fetchrow(_REVOKE, store_id, rule_id, user_id)
        if row is None:
            raise RuleNotFound
        return _rule(row)

    async def list(
        self, store_id: StoreId, user_id: UserId, *, include_ended: bool, before: str, most: int
    ) -> Sequence[Rule]:
        """Return the user's and the store's rules in descending order of id.

        If `user_id` is empty, return all rules.
        """
        rows = await self._database.fetch(_LIST, store_id, user_id, include_ended, before, most)
        return [_rule(row) for row in rows]

    async def use(self, store_id: StoreId, rule_id: str, call_id: CallId) -> bool:
        """Count a call once if the rule is in force. Return whether the rule has allowed the call. Atomic."""
        async with self._database.acquire() as connection:
            if await connection.fetchval(_USE, store_id, rule_id, call_id):
                return True
            # The call was already counted, or the rule is no longer in force.
            return bool(await connection.fetchval(_HAS_ALLOWED, store_id, rule_id, call_id))

    async def has_allowed(self, store_id: StoreId, rule_id: str, call_id: CallId) -> bool:
        """Return whether the rule has allowed the call and is neither revoked nor expired."""
        return bool(await self._database.fetchval(_HAS_ALLOWED, store_id, rule_id, call_id))

    async def forget(self, older_than_seconds: float) -> None:
        """Delete records of allowed calls that are older than the given age. The rules keep their use counts."""
        await self._database.execute(_FORGET, older_than_seconds)


def _rule(row: asyncpg.Record) -> Rule:
    fields = dict(row)
    fields.pop("request_hash", None)
    arguments = msgspec.msgpack.decode(fields.pop("arguments"), type=tuple[ArgumentPattern, ...])
    effect, scope = RuleEffect(fields.pop("effect")), RuleScope(fields.pop("scope"))
    return Rule(effect=effect, scope=scope, arguments=arguments, **fields)
