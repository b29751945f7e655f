"""Stores model-generated titles in PostgreSQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, timedelta
from operator import itemgetter
from typing import Final

from asyncpg import Record

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.event.v1 import message_pb2
from pawl.job.v1.agents_pb2 import TokenBudget
from pawl.job.v1.titles_pb2 import TitleTask
from pawl.job_store.conversations.store.search_index import put_title
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rules.conversations import ATTEMPTS_MAX, TEXT_CHARACTERS_MAX, title_in_reply
from pawl.job_store.ledger.rules.usage import UsageKey, Used
from pawl.job_store.ledger.store import usage
from pawl.job_store.ledger.store.columns import joined
from pawl.server.db.database import Database, DatabaseAdapter, read_each
from pawl.values import RunState, Usage

# The statements are built only from constants in this module.
# ruff: noqa: S608

# Skips conversations that have no user, too many attempts, or an earlier answer. IS NOT DISTINCT FROM prevents the
# planner from reading all the user's runs.
_CLAIM: Final = f"""
WITH due AS MATERIALIZED (
    SELECT store_id, conversation_id FROM job_store.conversations WHERE title_at <= now()
    ORDER BY title_at LIMIT $1 FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE job_store.conversations AS c SET title_attempts = c.title_attempts + 1,
        title_at = CASE WHEN c.title_attempts < $2 AND c.user_id <> '' AND NOT EXISTS (
            SELECT FROM job_store.runs AS before JOIN job_store.runs AS own USING (store_id, conversation_id)
            WHERE before.store_id = c.store_id AND before.conversation_id = c.conversation_id
            AND before.user_id IS NOT DISTINCT FROM c.user_id
            AND before.state = {RunState.COMPLETED.value} AND NOT before.imported
            AND own.run_id = c.title_run_id AND before.end_time < own.end_time
        ) THEN now() + $3::interval END
    FROM due WHERE c.store_id = due.store_id AND c.conversation_id = due.conversation_id
    RETURNING c.store_id, c.conversation_id, c.title_attempts, c.title_at, c.title_run_id
)
SELECT c.store_id, c.conversation_id, c.title_attempts AS attempt, asked.body AS asked, answered.body AS answered,
    r.agent_name, r.user_id
FROM claimed AS c JOIN job_store.runs AS r ON r.store_id = c.store_id AND r.run_id = c.title_run_id
CROSS JOIN LATERAL (
    SELECT m.body FROM job_store.messages AS m
    WHERE m.store_id = c.store_id AND m.conversation_id = c.conversation_id AND m.run_id = c.title_run_id
    ORDER BY m.number LIMIT 1
) AS asked CROSS JOIN LATERAL (
    SELECT m.body FROM job_store.messages AS m
    WHERE m.store_id = c.store_id AND m.conversation_id = c.conversation_id AND m.run_id = c.title_run_id
    ORDER BY m.number DESC LIMIT 1
) AS answered
WHERE c.title_at IS NOT NULL
"""
_SET: Final = """
UPDATE job_store.conversations SET model_title = $4,
    title_at = CASE WHEN $4 = '' AND title_attempts < $5 THEN now() + $6::interval END
WHERE store_id = $1 AND conversation_id = $2 AND title_attempts = $3 AND title_at IS NOT NULL AND user_id <> ''
RETURNING user_id, title
"""
_RUN: Final = """
SELECT r.user_id, r.agent_name, now() AS time FROM job_store.conversations AS c
CROSS JOIN LATERAL (
    SELECT user_id, agent_name FROM job_store.runs WHERE store_id = c.store_id AND run_id = c.title_run_id OFFSET 0
) AS r
WHERE c.store_id = $1 AND c.conversation_id = $2 AND r.user_id <> ''
"""
_PUT_OFF: Final = """
UPDATE job_store.conversations SET title_at = $4, title_attempts = title_attempts - 1
WHERE store_id = $1 AND conversation_id = $2 AND title_attempts = $3 AND title_at IS NOT NULL
"""
_LEASE: Final = timedelta(minutes=2)
_PAUSE: Final = timedelta(minutes=1)


class PostgresTitles(DatabaseAdapter):
    """Stores model-generated titles. `budgets` returns the token budgets that apply to a user's runs with an agent."""

    def __init__(
        self,
        database: Database,
        budgets: Callable[[StoreId, UserId, str], Awaitable[Sequence[TokenBudget]]],
        limits_of: LimitsOf,
    ) -> None:
        super().__init__(database)
        self._budgets = budgets
        self._limits_of = limits_of

    async def claim(self, *, titles_max: int) -> Sequence[TitleTask]:
        """Claim conversations that need a title. Each claim lasts for two minutes.

        If a token budget is used up, postpone the title until the budget's day or month ends. Skip titles whose model
        the store may not use. After a conversation's last allowed claim, no further attempt is made.
        """
        records = await self._database.fetch(_CLAIM, titles_max, ATTEMPTS_MAX, _LEASE)
        read = read_each("title", records, lambda each: (each, _task(each)), itemgetter("conversation_id"))
        tasks = []
        for record, task in read:
            budgets = await self._budgets(record["store_id"], record["user_id"], record["agent_name"])
            limits = self._limits_of(StoreId(task.store_id))
            used_up = [each.end_time.ToDatetime(UTC) for each in budgets if each.tokens_max <= each.tokens_used]
            if used_up:
                attempt = record["store_id"], record["conversation_id"], record["attempt"]
                await self._database.execute(_PUT_OFF, *attempt, max(used_up))
            elif not limits.refused_model([task.model]):
                task.model_server = limits.model_server
                tasks.append(task)
        return tasks

    async def put(
        self, store_id: StoreId, conversation_id: ConversationId, attempt: int, text: str, *, model: str, used: Usage
    ) -> None:
        """Store the title from a model's answer if the conversation still needs one, and count the usage."""
        title = title_in_reply(text)
        place = store_id, conversation_id
        async with self._database.transaction() as connection:
            stored = await connection.fetchrow(_SET, *place, attempt, title, ATTEMPTS_MAX, _PAUSE)
            if stored is not None and title and not stored["title"]:
                await put_title(connection, store_id, conversation_id, stored["user_id"], title)
            run = await connection.fetchrow(_RUN, *place)
            if run is not None and used != Usage():
                key = UsageKey.at(run["time"], store_id, run["agent_name"], run["user_id"], model=model)
                statement, arguments = joined(usage.additions([(key, Used.by_model(used))]))
                await connection.execute(statement, *arguments)


def _task(record: Record) -> TitleTask:
    requested, answered = (message_pb2.Message.FromString(record[name]) for name in ("asked", "answered"))
    return TitleTask(
        store_id=record["store_id"],
        conversation_id=record["conversation_id"],
        attempt=record["attempt"],
        model=answered.model,
        user_text=requested.text[:TEXT_CHARACTERS_MAX],
        answer_text=answered.text[:TEXT_CHARACTERS_MAX],
    )
