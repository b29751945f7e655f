-- The secrets with which the audit makes its digests, one for what was said in each conversation, and in each rule. Null
-- once that was erased: then the digests say nothing. Entries from before have plain digests.
CREATE TABLE audit_keys (
    store_id text NOT NULL,
    key_id   text NOT NULL,
    secret   bytea,
    PRIMARY KEY (store_id, key_id)
);

-- Runs of erased conversations, for a week: nothing of them begins any more, whoever still asks.
CREATE TABLE erased_runs (
    store_id   text NOT NULL,
    run_id     text NOT NULL,
    erase_time timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, run_id)
);
CREATE INDEX erased_runs_old ON erased_runs (erase_time);
