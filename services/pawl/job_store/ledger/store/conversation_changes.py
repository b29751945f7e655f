"""Reads changes in conversations for the clients that watch them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from asyncpg import Record

from pawl.chassis.ids import ConversationId, RunId, UserId
from pawl.job_store.ledger.reading import ChangedRuns
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow
from pawl.server.db.database import Database
from pawl.values import CallState

# The statements are built only from constants in this package.
# ruff: noqa: S608

_KEYS: Final = "run_id, conversation_id, state, update_time, create_time"
_COLUMNS: Final = f"{_KEYS}, parent_run_id, version"
# The version of a row, xmin, differs after each change. The reason why a QUEUED run
# without a worker is waiting depends on other rows. A job does not execute a call of its parent.
_READ: Final = f"""{_KEYS}, CASE WHEN reports_to = '' THEN parent_run_id ELSE '' END AS parent_run_id,
    CASE WHEN state > 1 OR active THEN xmin::text ELSE '' END AS version"""
_NEWEST: Final = "ORDER BY create_time DESC, run_id DESC LIMIT"
# Open runs are found by id. Only the newest ended runs are read, so that the cost does not grow with the conversation.
_RUNS: Final = f"""
WITH RECURSIVE found ({_COLUMNS}) AS (
    (
        SELECT {_COLUMNS} FROM unnest($4::text[]) AS k (id) CROSS JOIN LATERAL (
            SELECT {_READ}, user_id FROM job_store.runs WHERE store_id = $1 AND run_id = k.id OFFSET 0
        ) AS known WHERE user_id = $2 AND state < 10
        UNION
        SELECT {_COLUMNS} FROM (
            SELECT {_READ}, user_id, imported FROM job_store.runs
            WHERE store_id = $1 AND conversation_id = $3 {_NEWEST} 200
        ) AS newest WHERE user_id = $2 AND NOT imported AND update_time >= $5
        UNION
        SELECT {_COLUMNS} FROM (
            SELECT {_READ}, user_id FROM job_store.runs
            WHERE store_id = $1 AND reports_to = $3 AND reports_to <> '' {_NEWEST} 100
        ) AS newest WHERE user_id = $2 AND update_time >= $5
    )
    UNION
    SELECT below.* FROM found CROSS JOIN LATERAL (
        SELECT {_READ} FROM job_store.runs
        WHERE store_id = $1 AND parent_run_id = found.run_id AND parent_run_id <> '' AND user_id = $2
        AND (state < 10 OR update_time >= $5) OFFSET 0
    ) AS below
)
SELECT now() AS time, run_id, conversation_id, parent_run_id, version, state < 10 AS is_open,
    $6 OR update_time >= $5 OR coalesce((
        SELECT true FROM job_store.calls AS c
        WHERE c.store_id = $1 AND c.run_id = found.run_id AND c.state = {CallState.DELEGATED.value} AND c.state < 10
        LIMIT 1
    ), false) AS has_changed
FROM (SELECT) AS one LEFT JOIN found ON true ORDER BY create_time, run_id LIMIT 1000
"""
_VERSIONS: Final = f"""
SELECT coalesce(v.version, '') AS version
FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS k (store_id, conversation_id, number)
LEFT JOIN LATERAL (
    SELECT concat_ws('/', c.xmin, (
        SELECT r.state_time FROM job_store.runs AS r WHERE r.store_id = c.store_id AND r.run_id = c.active_run_id
    ), CASE WHEN c.background IS NOT NULL THEN (
        SELECT max(state_time) FROM (
            SELECT state_time FROM job_store.runs
            WHERE store_id = c.store_id AND reports_to = c.conversation_id AND reports_to <> '' {_NEWEST} 20
        ) AS newest
    ) END) AS version
    FROM job_store.conversations AS c
    WHERE c.store_id = k.store_id AND c.conversation_id = k.conversation_id OFFSET 0
) AS v ON true
ORDER BY k.number
"""


async def runs(
    database: Database, conversation: ConversationRow, user_id: UserId, *, since: datetime | None, all_open: bool
) -> ChangedRuns:
    """See `reading.Reads.changed_runs`."""
    jobs = (job.run_id for job in conversation.background.open_jobs)
    known = [run_id for run_id in (conversation.active_run_id, *conversation.queue, *jobs) if run_id]
    store_id, conversation_id = conversation.key.store_id, conversation.conversation_id
    records = await database.fetch(_RUNS, store_id, user_id, conversation_id, known, since, all_open or since is None)
    found = [record for record in records if record["run_id"] is not None]
    is_open = [record for record in found if record["is_open"]]
    below: defaultdict[str, list[Record]] = defaultdict(list)
    for record in found:
        below[record["parent_run_id"]].append(record)

    def version(record: Record) -> str:
        # An open run shows what its child runs are waiting for.
        children = below[record["run_id"]] if record["is_open"] else ()
        parts = [record["version"], *map(version, children)]
        return ",".join(parts) if all(parts) else ""

    return ChangedRuns(
        time=records[0]["time"],
        versions={RunId(record["run_id"]): version(record) for record in found if record["has_changed"]},
        open_run_ids=[RunId(record["run_id"]) for record in is_open],
        conversation_ids=sorted({conversation_id} | {ConversationId(record["conversation_id"]) for record in is_open}),
    )


async def versions(database: Database, keys: Sequence[ConversationKey]) -> Sequence[str]:
    """See `reading.Reads.versions`."""
    records = await database.fetch(_VERSIONS, [key.store_id for key in keys], [key.conversation_id for key in keys])
    return [record["version"] for record in records]
