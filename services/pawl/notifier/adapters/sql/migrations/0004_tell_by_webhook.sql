-- The webhook that a notification is about. Of the version before, none.
ALTER TABLE notifications ADD COLUMN webhook_id text NOT NULL DEFAULT '';

CREATE TABLE webhooks (
    webhook_id     text        NOT NULL PRIMARY KEY,
    store_id       text        NOT NULL,
    user_id        text        NOT NULL,
    request_id     text        NOT NULL,
    request_hash   bytea       NOT NULL,
    name           text        NOT NULL,
    url            text        NOT NULL,
    host           text        NOT NULL,
    -- Empty: all.
    kinds          text[]      NOT NULL,
    enabled        boolean     NOT NULL DEFAULT true,
    disable_reason text        NOT NULL DEFAULT '',
    -- Needed to sign with, so not kept as digests.
    secret         bytea       NOT NULL,
    former_secrets bytea[]     NOT NULL DEFAULT '{}',
    former_times   timestamptz[] NOT NULL DEFAULT '{}',
    failing_since  timestamptz,
    create_time    timestamptz NOT NULL
);
CREATE INDEX webhooks_by_user ON webhooks (store_id, user_id, webhook_id);
CREATE UNIQUE INDEX webhooks_by_request ON webhooks (store_id, user_id, request_id) WHERE request_id <> '';

CREATE TABLE webhook_deliveries (
    delivery_id  text        NOT NULL PRIMARY KEY,
    webhook_id   text        NOT NULL,
    store_id     text        NOT NULL,
    user_id      text        NOT NULL,
    -- Null for a test.
    number       bigint,
    type         text        NOT NULL,
    body         text        NOT NULL,
    state        text        NOT NULL DEFAULT 'waiting',
    tries        integer     NOT NULL DEFAULT 0,
    insert_time  timestamptz NOT NULL DEFAULT now(),
    -- When it is tried next, or while it is tried: when others may take it over. Null unless it waits.
    due_time     timestamptz DEFAULT now(),
    claimed      boolean     NOT NULL DEFAULT false,
    try_time     timestamptz,
    status       integer     NOT NULL DEFAULT 0,
    latency_ms   integer     NOT NULL DEFAULT 0,
    last_error   text        NOT NULL DEFAULT '',
    -- What removes a notification, being too old or erased, removes what was told of it, in every version.
    FOREIGN KEY (store_id, user_id, number) REFERENCES notifications ON DELETE CASCADE
);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_time) WHERE due_time IS NOT NULL;
CREATE INDEX webhook_deliveries_by_webhook ON webhook_deliveries (webhook_id, insert_time DESC, delivery_id DESC);
CREATE INDEX webhook_deliveries_by_notification ON webhook_deliveries (store_id, user_id, number);
CREATE INDEX webhook_deliveries_tests ON webhook_deliveries (insert_time) WHERE number IS NULL;
