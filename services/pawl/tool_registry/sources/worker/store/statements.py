"""SQL statements for remote workers and their calls."""

from __future__ import annotations

from typing import Final

from pawl.tool_registry.rules.registering import WORKER

CHANNEL: Final = "pawl_worker_calls"

# Constants and column names only.
# ruff: noqa: S608


def _notify(kind: str, store: str, name: str) -> str:
    return f"pg_notify('{CHANNEL}', '{kind} ' || {store} || ' ' || {name})"


_WORKER_HAS_LEASE: Final = """EXISTS (
    SELECT FROM tool_registry.workers w
    WHERE w.store_id = c.store_id AND w.group_name = c.group_name AND w.worker_id = c.worker_id
    AND w.expires_at > clock_timestamp())"""
_LOST: Final = f"(c.is_lost OR NOT {_WORKER_HAS_LEASE})"
_IS_LOST: Final = f"(c.state = 'HELD' AND {_LOST})"
# Forces lookups by key: with `=`, the planner would read all calls in that state while there are no statistics.
_IS_HELD: Final = "c.state NOT IN ('WAITING', 'DONE')"
_IS_WAITING: Final = "c.state NOT IN ('HELD', 'DONE')"
_ASKER_HAS_LEASE: Final = """EXISTS (
    SELECT FROM tool_registry.instances i WHERE i.instance_id = c.asker_id AND i.expires_at > clock_timestamp())"""
_HAS_TOOL: Final = """EXISTS (
    SELECT FROM unnest(w.tool_names, w.tool_hashes) AS t (name, hash) WHERE t.name = {} AND t.hash = {})"""
_CALL: Final = "c.store_id = $1 AND c.call_id = $2"
_OWN: Final = f"{_CALL} AND c.token = $3"
_BY_WORKER: Final = "c.store_id = $1 AND c.group_name = $2 AND c.worker_id = $3"
_HELD_BY_WORKER: Final = (
    f"{_BY_WORKER} AND c.call_id = $4 AND c.lease_epoch = $5 AND c.state = 'HELD' AND NOT c.is_lost"
)

HAS_SUCCESSOR: Final = f"""
SELECT EXISTS (
    SELECT FROM tool_registry.tool_versions
    WHERE store_id = $1 AND name = $4 AND definition_hash = $5 AND source = $7
) AND EXISTS (
    SELECT FROM tool_registry.workers w
    WHERE w.store_id = $1 AND w.group_name = $2 AND w.worker_id <> $3 AND w.expires_at > clock_timestamp()
    AND {_HAS_TOOL.format("$4", "$6")})
"""
OWN_GROUP: Final = """
INSERT INTO tool_registry.worker_groups AS g (store_id, group_name, user_id) VALUES ($1, $2, $3)
ON CONFLICT (store_id, group_name) DO UPDATE SET
    user_id = CASE WHEN EXISTS (
        SELECT FROM tool_registry.tools t JOIN tool_registry.tool_versions v USING (store_id, name, version)
        WHERE store_id = $1 AND v.source = $4
    ) THEN g.user_id ELSE excluded.user_id END
RETURNING user_id
"""
UNSERVED: Final = f"""
SELECT DISTINCT o.attachment
FROM tool_registry.workers o CROSS JOIN LATERAL unnest(o.tool_names, o.tool_hashes) AS own (name, hash)
JOIN tool_registry.tools t ON t.store_id = o.store_id AND t.name = own.name
JOIN tool_registry.tool_versions v ON v.store_id = t.store_id AND v.name = t.name AND v.version = t.version
WHERE o.attachment = ANY ($1) AND v.source = '{WORKER}:' || o.group_name AND v.definition_hash <> own.hash
AND NOT EXISTS (
    SELECT FROM tool_registry.workers w
    WHERE w.store_id = o.store_id AND w.group_name = o.group_name AND w.expires_at > clock_timestamp()
    AND {_HAS_TOOL.format("v.name", "v.definition_hash")})
"""
ATTACH: Final = """
INSERT INTO tool_registry.workers
    (store_id, group_name, worker_id, instance_id, attachment, expires_at, tool_names, tool_hashes)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6), $7, $8)
ON CONFLICT (store_id, group_name, worker_id) DO UPDATE SET
    instance_id = excluded.instance_id, attachment = excluded.attachment, expires_at = excluded.expires_at,
    tool_names = excluded.tool_names, tool_hashes = excluded.tool_hashes
"""
LOSE: Final = f"""
WITH lost AS (
    UPDATE tool_registry.worker_calls c SET is_lost = true
    WHERE {_BY_WORKER} AND c.state = 'HELD'
    AND NOT EXISTS (
        SELECT FROM unnest($4::text[], $5::bigint[]) AS h (call_id, lease_epoch)
        WHERE h.call_id = c.call_id AND h.lease_epoch = c.lease_epoch)
    RETURNING c.store_id, c.call_id)
SELECT {_notify("CALL", "store_id", "call_id")} FROM lost
"""
HELD: Final = f"""
SELECT c.call_id, c.lease_epoch FROM tool_registry.worker_calls c
WHERE {_BY_WORKER} AND c.state = 'HELD' AND NOT c.is_lost
"""
HELD_BY: Final = """
SELECT w.attachment, c.store_id, c.call_id, c.lease_epoch
FROM tool_registry.workers w CROSS JOIN LATERAL (
    SELECT c.store_id, c.call_id, c.lease_epoch FROM tool_registry.worker_calls c
    WHERE c.store_id = w.store_id AND c.group_name = w.group_name AND c.worker_id = w.worker_id
    AND c.state = 'HELD' AND NOT c.is_lost OFFSET 0
) AS c
WHERE w.attachment = ANY ($1)
"""
RENEW: Final = """
UPDATE tool_registry.workers w SET expires_at = clock_timestamp() + make_interval(secs => r.seconds)
FROM unnest($1::text[], $2::double precision[]) AS r (attachment, seconds) WHERE w.attachment = r.attachment
RETURNING w.attachment
"""
DETACH: Final = """
DELETE FROM tool_registry.workers
WHERE store_id = $1 AND group_name = $2 AND worker_id = $3 AND attachment = $4
"""
IS_ATTACHED: Final = f"""
SELECT EXISTS (
    SELECT FROM tool_registry.workers w
    WHERE w.store_id = $1 AND w.group_name = $2 AND w.expires_at > clock_timestamp()
    AND {_HAS_TOOL.format("$3", "$4")})
"""
# The lock prevents the worker from attaching to another process during the statement.
_ME: Final = """SELECT FROM tool_registry.workers w
    WHERE w.attachment = {} AND w.expires_at > clock_timestamp() FOR SHARE"""
ADD: Final = f"""
WITH me AS ({_ME.format("$13")}), given AS (
    SELECT CASE WHEN EXISTS (SELECT FROM me) THEN 'HELD' ELSE 'WAITING' END AS state
    WHERE NOT EXISTS (SELECT FROM tool_registry.erased_runs r WHERE r.store_id = $1 AND r.run_id = $15)
), added AS (
    INSERT INTO tool_registry.worker_calls AS c
        (store_id, call_id, group_name, tool_name, definition_hash, purpose, details, attempt, deadline, token,
         asker_id, state, lease_epoch, worker_id, origin, run_id, told_epochs)
    SELECT $1, $2, $3, $4, $5, $6, $7, $8, clock_timestamp() + make_interval(secs => $9), $10, $11, given.state,
        CASE WHEN given.state = 'HELD' THEN 1 ELSE 0 END, $12, $14, $15,
        CASE WHEN given.state = 'HELD' AND $6 = 'RECONCILE' THEN '{{1}}'::bigint[] ELSE '{{}}' END FROM given
    ON CONFLICT (store_id, call_id) DO UPDATE SET
        group_name = excluded.group_name, tool_name = excluded.tool_name, definition_hash = excluded.definition_hash,
        purpose = excluded.purpose, details = excluded.details, attempt = excluded.attempt,
        deadline = excluded.deadline, token = excluded.token, asker_id = excluded.asker_id, state = excluded.state,
        lease_epoch = c.lease_epoch + excluded.lease_epoch, worker_id = excluded.worker_id, is_lost = false,
        cancel_requested = false, progress = NULL, answer = NULL, is_accepted = false,
        origin = coalesce(excluded.origin, c.origin),
        told_epochs = CASE WHEN excluded.told_epochs = '{{}}' THEN c.told_epochs
            ELSE c.told_epochs || (c.lease_epoch + 1) END
    WHERE c.token <> excluded.token
    RETURNING c.store_id, c.group_name, c.state, c.lease_epoch)
SELECT state, lease_epoch,
    CASE WHEN state = 'WAITING' THEN {_notify("WAITING", "store_id", "group_name")} END FROM added
"""
ADDED_BEFORE: Final = f"""
SELECT CASE WHEN c.worker_id = $4 THEN c.state ELSE 'WAITING' END AS state, c.lease_epoch
FROM tool_registry.worker_calls c WHERE {_OWN}
"""
# The token may already be stored, if the response to an earlier try was lost.
ADOPT: Final = f"""
UPDATE tool_registry.worker_calls c SET
    token = $3, asker_id = $7, deadline = clock_timestamp() + make_interval(secs => $6)
WHERE {_CALL} AND c.group_name = $4 AND c.tool_name = $5 AND c.purpose = 'RUN' AND NOT c.cancel_requested
AND (c.state <> 'DONE' OR c.answer IS NOT NULL) AND (c.asker_id = $7 OR NOT {_ASKER_HAS_LEASE})
RETURNING c.call_id
"""
CLAIM: Final = f"""
WITH me AS ({_ME.format("$7")}), due AS (
    SELECT c.store_id, c.call_id FROM tool_registry.worker_calls c
    WHERE c.store_id = $1 AND c.group_name = $2 AND c.state = 'WAITING' AND c.deadline > clock_timestamp()
    AND EXISTS (
        SELECT FROM unnest($4::text[], $5::text[]) AS t (name, hash)
        WHERE t.name = c.tool_name AND t.hash = c.definition_hash)
    AND {_ASKER_HAS_LEASE} AND EXISTS (SELECT FROM me)
    ORDER BY c.deadline LIMIT $6 FOR UPDATE OF c SKIP LOCKED)
UPDATE tool_registry.worker_calls c SET state = 'HELD', lease_epoch = c.lease_epoch + 1, worker_id = $3,
    told_epochs = CASE WHEN c.purpose = 'RECONCILE' THEN c.told_epochs || (c.lease_epoch + 1) ELSE c.told_epochs END
FROM due WHERE c.store_id = due.store_id AND c.call_id = due.call_id
RETURNING c.*, (
    SELECT k.content FROM tool_registry.checkpoints k WHERE k.store_id = c.store_id AND k.call_id = c.call_id
) AS last_checkpoint
"""
PUT_BACK: Final = f"""
WITH back AS (
    UPDATE tool_registry.worker_calls c SET
        state = CASE WHEN c.cancel_requested THEN 'DONE' ELSE 'WAITING' END, is_lost = false
    WHERE {_CALL} AND c.lease_epoch = $3 AND {_IS_HELD}
    RETURNING c.store_id, c.call_id, c.group_name)
SELECT {_notify("WAITING", "store_id", "group_name")}, {_notify("CALL", "store_id", "call_id")} FROM back
"""
REPORT: Final = f"""
WITH reported AS (
    UPDATE tool_registry.worker_calls c SET progress = $6 WHERE {_HELD_BY_WORKER} RETURNING c.store_id, c.call_id)
SELECT {_notify("CALL", "store_id", "call_id")} FROM reported
"""
# The lock prevents the call from being reassigned during the statement.
KEEP_CHECKPOINT: Final = f"""
WITH mine AS (
    SELECT c.store_id, c.call_id, c.run_id, c.token, c.attempt FROM tool_registry.worker_calls c
    WHERE {_HELD_BY_WORKER} AND NOT c.cancel_requested FOR SHARE), kept AS (
    INSERT INTO tool_registry.checkpoints (store_id, call_id, run_id, token, attempt, content)
    SELECT store_id, call_id, run_id, token, attempt, $6 FROM mine
    ON CONFLICT (store_id, call_id) DO UPDATE SET
        token = excluded.token, attempt = excluded.attempt, content = excluded.content, written_at = now()
    RETURNING store_id, call_id)
SELECT {_notify("CALL", "store_id", "call_id")} FROM kept
"""
FINISH: Final = f"""
WITH finished AS (
    UPDATE tool_registry.worker_calls c SET
        state = 'DONE', answer = $6, is_accepted = NOT c.cancel_requested
    WHERE {_HELD_BY_WORKER} RETURNING c.*)
SELECT is_accepted, CASE WHEN NOT is_accepted AND NOT $5 = ANY (told_epochs) THEN origin END AS late_origin,
    CASE WHEN asker_id <> $7 THEN {_notify("CALL", "store_id", "call_id")} END FROM finished
"""
KNOWN: Final = """
WITH known AS (
    SELECT c.*, c.is_accepted AND c.worker_id = $3 AND c.lease_epoch = $5 AS was_accepted
    FROM tool_registry.worker_calls c WHERE c.store_id = $1 AND c.group_name = $2 AND c.call_id = $4
    AND c.lease_epoch >= $5)
SELECT was_accepted AS is_accepted,
    CASE WHEN NOT was_accepted AND NOT $5 = ANY (told_epochs) THEN origin END AS late_origin FROM known
"""
MARK_REPORTED: Final = f"""
UPDATE tool_registry.worker_calls c SET told_epochs = c.told_epochs || $3::bigint
WHERE {_CALL} AND NOT $3 = ANY (c.told_epochs)
"""
FIND: Final = f"""
SELECT c.state, c.purpose, c.progress, c.answer, {_IS_LOST} AS is_lost, c.is_lost AS is_dropped, (
    SELECT k.written_at FROM tool_registry.checkpoints k
    WHERE k.store_id = c.store_id AND k.call_id = c.call_id AND k.token = c.token
) AS checkpoint_time
FROM tool_registry.worker_calls c WHERE {_OWN}
"""
REASSIGN: Final = f"""
WITH again AS (
    UPDATE tool_registry.worker_calls c SET
        state = 'WAITING', purpose = $4, is_lost = false, progress = NULL, answer = NULL, is_accepted = false,
        attempt = c.attempt + CASE WHEN $4 = 'RUN' THEN 1 ELSE 0 END
    WHERE {_OWN} AND (c.state = 'DONE' OR {_IS_LOST}) AND NOT c.cancel_requested
    RETURNING c.store_id, c.group_name)
SELECT {_notify("WAITING", "store_id", "group_name")} FROM again
"""
_CLOSE: Final = f"UPDATE tool_registry.worker_calls c SET state = 'DONE', details = '' WHERE {_OWN}"
CONCLUDE_LOST: Final = f"{_CLOSE} AND {_IS_HELD} AND {_LOST} RETURNING c.call_id"
WITHDRAW: Final = f"{_CLOSE} AND {_IS_WAITING} RETURNING c.call_id"
ABANDON: Final = f"{_CLOSE} AND {_IS_HELD} AND c.worker_id = $4"
CANCEL: Final = f"""
WITH cancelled AS (
    UPDATE tool_registry.worker_calls c SET
        cancel_requested = true, state = CASE WHEN c.state = 'WAITING' THEN 'DONE' ELSE c.state END
    WHERE {_OWN} AND c.state <> 'DONE' RETURNING c.store_id, c.call_id, c.state)
SELECT state, {_notify("CANCEL", "store_id", "call_id")} FROM cancelled
"""
SETTLE: Final = f"""
UPDATE tool_registry.worker_calls c SET details = '', answer = NULL WHERE {_OWN} AND c.state = 'DONE'
"""
NEWS: Final = f"""
SELECT c.store_id, c.call_id FROM tool_registry.worker_calls c
WHERE c.asker_id = $1 AND (c.state = 'HELD' OR c.answer IS NOT NULL) AND (c.answer IS NOT NULL OR {_IS_LOST})
"""
WAITING_GROUPS: Final = """
SELECT DISTINCT store_id, group_name FROM tool_registry.worker_calls WHERE state = 'WAITING'
"""
UNWANTED: Final = """
SELECT h.store_id, h.group_name, h.worker_id, h.call_id
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[])
    AS h (store_id, group_name, worker_id, call_id, lease_epoch)
WHERE NOT EXISTS (
    SELECT FROM tool_registry.worker_calls c
    WHERE c.store_id = h.store_id AND c.call_id = h.call_id AND c.group_name = h.group_name
    AND c.worker_id = h.worker_id AND c.lease_epoch = h.lease_epoch
    AND c.state = 'HELD' AND NOT c.is_lost AND NOT c.cancel_requested OFFSET 0)
"""
FORGET_CALLS: Final = """
DELETE FROM tool_registry.worker_calls WHERE deadline < now() - interval '1 day'
"""
FORGET_WORKERS: Final = """
DELETE FROM tool_registry.workers WHERE expires_at < clock_timestamp() - interval '1 day'
"""
