-- One row per user who was ever told anything: the lock under which numbers are given out.
CREATE TABLE inboxes (
    store_id    text   NOT NULL,
    user_id     text   NOT NULL,
    last_number bigint NOT NULL,
    PRIMARY KEY (store_id, user_id)
);

CREATE TABLE notifications (
    store_id        text        NOT NULL,
    user_id         text        NOT NULL,
    number          bigint      NOT NULL,
    notification_id text        NOT NULL,
    kind            text        NOT NULL,
    run_id          text        NOT NULL,
    conversation_id text        NOT NULL,
    event_id        text        NOT NULL,
    title           text        NOT NULL,
    body            text        NOT NULL,
    create_time     timestamptz NOT NULL,
    insert_time     timestamptz NOT NULL DEFAULT now(),
    publish_time    timestamptz,
    read_time       timestamptz,
    PRIMARY KEY (store_id, user_id, number),
    -- The same event gives one notification.
    UNIQUE (store_id, user_id, notification_id)
);

CREATE INDEX notifications_unread ON notifications (store_id, user_id, number) WHERE read_time IS NULL;
CREATE INDEX notifications_unpublished ON notifications (insert_time) WHERE publish_time IS NULL;
CREATE INDEX notifications_by_age ON notifications (insert_time);
