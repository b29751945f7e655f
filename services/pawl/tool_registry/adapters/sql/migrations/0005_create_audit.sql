-- When a rate would be unused again. Lost in a crash of the database, which then lets a minute's worth begin anew.
CREATE UNLOGGED TABLE rates (
    store_id  text NOT NULL,
    name      text NOT NULL,
    unused_at timestamptz NOT NULL,
    PRIMARY KEY (store_id, name)
) WITH (fillfactor = 50);

-- The audit chain of each store. Rows are added and never changed or removed.
CREATE TABLE audit (
    store_id         text NOT NULL,
    seq              bigint NOT NULL,
    kind             text NOT NULL,
    recorded_at      timestamptz NOT NULL,
    user_id          text NOT NULL,
    run_id           text NOT NULL,
    call_id          text NOT NULL,
    tool_name        text NOT NULL,
    tool_version     integer NOT NULL,
    verdict          text NOT NULL,
    reason           text NOT NULL,
    by_user_id       text NOT NULL,
    arguments_sha256 text NOT NULL,
    result_sha256    text NOT NULL,
    result_bytes     bigint NOT NULL,
    duration_us      bigint NOT NULL,
    prev_hash        text NOT NULL,
    hash             text NOT NULL,
    PRIMARY KEY (store_id, seq)
);

CREATE INDEX audit_runs ON audit (store_id, run_id, seq);
CREATE INDEX audit_times ON audit (store_id, recorded_at);
-- A decision is written once, whoever reports it and how often.
CREATE UNIQUE INDEX audit_decisions ON audit (store_id, call_id, verdict, by_user_id) WHERE kind = 'DECIDED';

-- The last entry of each chain.
CREATE TABLE audit_heads (
    store_id text PRIMARY KEY,
    seq      bigint NOT NULL,
    hash     text NOT NULL
) WITH (fillfactor = 50);
