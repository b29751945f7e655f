-- Calls that somebody outside completes: their tool has ended, and they have not.
ALTER TABLE executions
    -- SHA-256 of the token.
    ADD COLUMN completion_digest bytea,
    -- What is remembered for whoever completes it: limits, names of secrets, the audit entry of its end.
    ADD COLUMN completion_terms  bytea,
    -- Until when it can be completed; null while its tool runs.
    ADD COLUMN awaits_until      timestamptz,
    -- SHA-256 of the end that somebody brought, and who did.
    ADD COLUMN completion        bytea,
    ADD COLUMN completed_by      text[],
    -- From when its end may be told to the audit chain and to its run; null where there is nothing to tell.
    ADD COLUMN untold_at         timestamptz;

CREATE UNIQUE INDEX executions_of_token ON executions (store_id, completion_digest)
    WHERE completion_digest IS NOT NULL;
CREATE INDEX executions_untold ON executions (untold_at) WHERE untold_at IS NOT NULL;
CREATE INDEX executions_awaited ON executions (awaits_until) WHERE awaits_until IS NOT NULL AND ended_at IS NULL;
