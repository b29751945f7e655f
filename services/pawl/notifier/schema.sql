-- One row per user who was ever notified. It is the lock for numbering.
CREATE TABLE inboxes (
    store_id text NOT NULL,
    user_id text NOT NULL,
    last_number bigint NOT NULL,
    PRIMARY KEY (store_id, user_id)
);

CREATE TABLE notifications (
    store_id text NOT NULL,
    user_id text NOT NULL,
    number bigint NOT NULL,
    notification_id text NOT NULL,
    kind text NOT NULL,
    run_id text NOT NULL,
    conversation_id text NOT NULL,
    event_id text NOT NULL,
    title text NOT NULL,
    body text NOT NULL,
    create_time timestamptz NOT NULL,
    insert_time timestamptz NOT NULL DEFAULT now(),
    publish_time timestamptz,
    read_time timestamptz,
    call_id text NOT NULL,
    channel_id text NOT NULL,
    over_time timestamptz,  -- when the need that it reports was resolved
    PRIMARY KEY (store_id, user_id, number)
);
CREATE INDEX notifications_by_age ON notifications (insert_time);
-- Each lookup has one index that fits it, starting with the most selective column: without statistics the planner
-- picks any index that starts with the store and reads everything of a user or store.
CREATE UNIQUE INDEX notifications_by_id ON notifications (notification_id, store_id, user_id);
CREATE INDEX notifications_needed ON notifications (store_id, run_id)
    WHERE over_time IS NULL AND kind IN ('input_needed', 'attention_needed', 'approval_needed', 'decision_needed');
CREATE INDEX notifications_of_conversation ON notifications (conversation_id, run_id, store_id);
CREATE INDEX notifications_unpublished ON notifications (insert_time) WHERE publish_time IS NULL;
CREATE INDEX notifications_unread ON notifications (store_id, user_id, number) WHERE read_time IS NULL;

-- Users who have called with an approver role, and when they last did.
CREATE TABLE approvers (
    store_id text NOT NULL,
    user_id text NOT NULL,
    seen_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, user_id)
);
CREATE INDEX approvers_by_time ON approvers (store_id, seen_time);

-- Recently erased conversations: notifications about them that are still pending are dropped.
CREATE TABLE erased_conversations (
    store_id text NOT NULL,
    conversation_id text NOT NULL,
    erase_time timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, conversation_id)
);
CREATE INDEX erased_conversations_old ON erased_conversations (erase_time);

CREATE TABLE webhooks (
    webhook_id text NOT NULL,
    store_id text NOT NULL,
    user_id text NOT NULL,
    request_id text NOT NULL,
    request_hash bytea NOT NULL,
    name text NOT NULL,
    url text NOT NULL,
    host text NOT NULL,
    kinds text[] NOT NULL,
    enabled boolean NOT NULL DEFAULT true,
    disable_reason text NOT NULL DEFAULT '',
    secret bytea NOT NULL,
    former_secrets bytea[] NOT NULL DEFAULT '{}',  -- needed for signing, so not digests
    former_times timestamptz[] NOT NULL DEFAULT '{}',
    failing_since timestamptz,
    create_time timestamptz NOT NULL,
    -- Delay after the notification. Skipped if it was read or settled by then.
    after_seconds integer NOT NULL DEFAULT 0,
    -- An e-mail channel is a webhook with a mailto: URL. This is when its address was confirmed; null before, and for
    -- webhooks.
    confirm_time timestamptz,
    -- When the confirmation code was created, and wrong attempts since.
    code_time timestamptz,
    code_tries integer NOT NULL DEFAULT 0,
    -- The credential that saved the channel last, and the user of the delegate that acted; empty for none.
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    PRIMARY KEY (webhook_id, store_id)
);
CREATE UNIQUE INDEX webhooks_by_request ON webhooks (store_id, user_id, request_id) WHERE request_id <> '';
CREATE INDEX webhooks_by_user ON webhooks (store_id, user_id, webhook_id);

CREATE TABLE webhook_deliveries (
    delivery_id text NOT NULL,
    webhook_id text NOT NULL,
    store_id text NOT NULL,
    user_id text NOT NULL,
    number bigint,
    type text NOT NULL,
    body text NOT NULL,
    state text NOT NULL DEFAULT 'waiting',
    tries integer NOT NULL DEFAULT 0,
    insert_time timestamptz NOT NULL DEFAULT now(),
    due_time timestamptz DEFAULT now(),
    claimed boolean NOT NULL DEFAULT false,
    try_time timestamptz,
    status integer NOT NULL DEFAULT 0,
    latency_ms integer NOT NULL DEFAULT 0,
    last_error text NOT NULL DEFAULT '',
    resent boolean NOT NULL DEFAULT false,  -- resent by the user, so preferences do not apply
    -- Its first attempt was delayed, by `after_seconds` or quiet hours.
    put_off boolean NOT NULL DEFAULT false,
    PRIMARY KEY (delivery_id, store_id),
    FOREIGN KEY (store_id, user_id, number) REFERENCES notifications ON DELETE CASCADE
);
CREATE INDEX webhook_deliveries_by_webhook ON webhook_deliveries (webhook_id, insert_time DESC, delivery_id DESC);
CREATE INDEX webhook_deliveries_due ON webhook_deliveries (due_time) WHERE due_time IS NOT NULL;
-- The due deliveries of a webhook.
CREATE INDEX webhook_deliveries_due_of_webhook ON webhook_deliveries (webhook_id, due_time)
    WHERE due_time IS NOT NULL;
-- As above: one fitting index, starting with the most selective column.
CREATE INDEX webhook_deliveries_of_notification ON webhook_deliveries (number, store_id, user_id);
CREATE INDEX webhook_deliveries_tests ON webhook_deliveries (insert_time) WHERE number IS NULL;
-- The test deliveries of a webhook.
CREATE INDEX webhook_deliveries_tests_of_webhook ON webhook_deliveries (webhook_id, insert_time)
    WHERE number IS NULL;
-- For counting the e-mails that a user was sent recently.
CREATE INDEX webhook_deliveries_tried ON webhook_deliveries (store_id, user_id, try_time)
    WHERE try_time IS NOT NULL;

CREATE TABLE preferences (
    store_id text NOT NULL,
    user_id text NOT NULL,
    kinds text[] NOT NULL,
    quiet text NOT NULL,
    PRIMARY KEY (store_id, user_id)
);

CREATE TABLE mutes (
    store_id text NOT NULL,
    user_id text NOT NULL,
    conversation_id text NOT NULL,
    until_time timestamptz,
    PRIMARY KEY (store_id, user_id, conversation_id)
);
CREATE INDEX mutes_by_conversation ON mutes (store_id, conversation_id);

-- Codes sent within the last day, also to deleted channels.
CREATE TABLE codes_sent (
    address text NOT NULL,
    store_id text NOT NULL,
    user_id text NOT NULL,
    sent_time timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX codes_sent_of_address ON codes_sent (lower(address), sent_time);
CREATE INDEX codes_sent_of_store ON codes_sent (store_id, sent_time);
CREATE INDEX codes_sent_old ON codes_sent (sent_time);

-- Events about ended deliveries and disabled channels, until NATS has them.
CREATE TABLE channel_events (
    event_id text NOT NULL DEFAULT ('che_' || replace(gen_random_uuid()::text, '-', '')),
    type text NOT NULL,
    store_id text NOT NULL,
    user_id text NOT NULL,
    channel_id text NOT NULL,
    delivery_id text NOT NULL,
    tries integer NOT NULL DEFAULT 0,
    status integer NOT NULL DEFAULT 0,
    error text NOT NULL,
    "time" timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, store_id)
);
CREATE INDEX channel_events_time ON channel_events ("time");

-- When users with a channel last watched a run: what they saw needs no notification.
CREATE TABLE viewers (
    store_id text NOT NULL,
    user_id text NOT NULL,
    run_id text NOT NULL,
    seen_time timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, run_id)
);
CREATE INDEX viewers_by_run ON viewers (store_id, run_id);
CREATE INDEX viewers_time ON viewers (seen_time);
