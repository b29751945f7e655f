-- What people have decided for the next time.
CREATE TABLE rules (
    store_id             text NOT NULL,
    rule_id              text NOT NULL,
    -- For idempotency; empty for none.
    request_id           text NOT NULL,
    request_hash         bytea NOT NULL,
    effect               text NOT NULL,
    scope                text NOT NULL,
    scope_id             text NOT NULL,
    user_id              text NOT NULL,
    tool_name            text NOT NULL,
    arguments            bytea NOT NULL,
    items_max            bigint NOT NULL,
    includes_destructive boolean NOT NULL,
    uses_max             bigint NOT NULL,
    uses                 bigint NOT NULL DEFAULT 0,
    tool_version         integer NOT NULL,
    reason               text NOT NULL,
    created_at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at           timestamptz,
    revoked_at           timestamptz,
    revoked_by           text NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, rule_id)
);

CREATE UNIQUE INDEX rules_request ON rules (store_id, user_id, request_id) WHERE request_id <> '';
CREATE INDEX rules_in_force ON rules (store_id) WHERE revoked_at IS NULL;

-- The calls that a rule has allowed: each counts once.
CREATE TABLE rule_uses (
    store_id text NOT NULL,
    rule_id  text NOT NULL,
    call_id  text NOT NULL,
    used_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (store_id, rule_id, call_id),
    FOREIGN KEY (store_id, rule_id) REFERENCES rules
);

CREATE INDEX rule_uses_time ON rule_uses (used_at);
