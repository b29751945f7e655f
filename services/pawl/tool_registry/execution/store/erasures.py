"""Erases the registry's data about conversations from PostgreSQL. All steps are idempotent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pawl.server.db.database import DatabaseAdapter
from pawl.server.db.erasures import ErasurePart
from pawl.tool_registry.policy.store.rule_rows import LOCK as LOCK_RULES

# Waits for concurrent writers. Later writers see the mark.
_NO_LONG_WAIT: Final = "SET LOCAL lock_timeout = '1s'"
_WAIT_FOR_WRITERS: Final = """
LOCK TABLE tool_registry.executions, tool_registry.worker_calls, tool_registry.checkpoints IN SHARE ROW EXCLUSIVE MODE
"""
_MARK_RUNS: Final = """
INSERT INTO tool_registry.erased_runs (store_id, run_id) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING
"""
_UNMARK_OLD: Final = "DELETE FROM tool_registry.erased_runs WHERE erase_time < now() - interval '7 days'"
# The row is kept, so that no new secret is created.
_DESTROY_SECRETS: Final = """
INSERT INTO tool_registry.audit_keys (store_id, key_id, secret) SELECT $1, unnest($2::text[]), NULL
ON CONFLICT (store_id, key_id) DO UPDATE SET secret = NULL
"""
_OF_CALLS: Final = (
    "DELETE FROM tool_registry.executions WHERE store_id = $1 AND call_id = ANY ($2::text[])",
    "DELETE FROM tool_registry.worker_calls WHERE store_id = $1 AND call_id = ANY ($2::text[])",
    "DELETE FROM tool_registry.checkpoints WHERE store_id = $1 AND call_id = ANY ($2::text[])",
    "DELETE FROM tool_registry.grant_uses WHERE store_id = $1 AND call_id = ANY ($2::text[])",
    # The changes to the plan remain. Only the earlier versions, which are kept for undo, are deleted.
    "DELETE FROM tool_registry.plan_changes WHERE store_id = $1 AND idempotency_key = ANY ($2::text[])",
)
# The request does not list all calls of a long job, because the ledger keeps only the most recent ones.
CALLS_OF_RUNS: Final = """
SELECT call_id FROM tool_registry.executions WHERE store_id = $1 AND run_id = ANY ($2::text[])
UNION SELECT call_id FROM tool_registry.checkpoints WHERE store_id = $1 AND run_id = ANY ($2::text[])
UNION SELECT call_id FROM tool_registry.worker_calls WHERE store_id = $1 AND run_id = ANY ($2::text[]) LIMIT 1000
"""
_RULES: Final = """
SELECT rule_id FROM tool_registry.rules
WHERE store_id = $1 AND scope IN ('RUN', 'CONVERSATION') AND scope_id = ANY ($2::text[]) FOR UPDATE
"""
_OF_RULES: Final = (
    "DELETE FROM tool_registry.rule_uses WHERE store_id = $1 AND rule_id = ANY ($2::text[])",
    "DELETE FROM tool_registry.rules WHERE store_id = $1 AND rule_id = ANY ($2::text[])",
)


class PostgresErasures(DatabaseAdapter):
    """Deletes the executions, results, worker calls and rules that belong to a conversation or its runs."""

    async def erase(self, part: ErasurePart) -> None:
        """Delete the data of runs and calls. Destroy the conversation's secret.

        Raises:
            DependencyUnavailable: The database is unavailable.
        """
        store_id, run_ids, call_ids = part.store_id, list(part.run_ids), list(part.call_ids)
        scopes = [part.conversation_id, *run_ids]
        async with self._database.transaction() as connection:
            await connection.execute(_NO_LONG_WAIT)
            await connection.execute(_WAIT_FOR_WRITERS)
            await connection.execute(_MARK_RUNS, store_id, run_ids)
        while found := await self._database.fetch(CALLS_OF_RUNS, store_id, run_ids):
            await self._remove_calls(store_id, [record["call_id"] for record in found])
        await self._remove_calls(store_id, call_ids)
        async with self._database.transaction() as connection:
            # Waits for concurrent rule writers; later ones find the secret destroyed.
            await connection.execute(LOCK_RULES, store_id)
            rule_ids = [record["rule_id"] for record in await connection.fetch(_RULES, store_id, scopes)]
            for statement in _OF_RULES:
                await connection.execute(statement, store_id, rule_ids)
            await connection.execute(_DESTROY_SECRETS, store_id, [part.conversation_id, *rule_ids])
        await self._database.execute(_UNMARK_OLD)

    async def _remove_calls(self, store_id: str, call_ids: Sequence[str]) -> None:
        async with self._database.transaction() as connection:
            for statement in _OF_CALLS:
                await connection.execute(statement, store_id, call_ids)
