-- What became of deliveries, and channels that were disabled, until NATS has it.
CREATE TABLE channel_events (
    event_id    text        PRIMARY KEY DEFAULT 'che_' || replace(gen_random_uuid()::text, '-', ''),
    type        text        NOT NULL,
    store_id    text        NOT NULL,
    user_id     text        NOT NULL,
    channel_id  text        NOT NULL,
    delivery_id text        NOT NULL,
    tries       integer     NOT NULL DEFAULT 0,
    status      integer     NOT NULL DEFAULT 0,
    error       text        NOT NULL,
    time        timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX channel_events_time ON channel_events (time);
