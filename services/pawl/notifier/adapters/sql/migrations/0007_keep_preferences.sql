CREATE TABLE preferences (
    store_id text   NOT NULL,
    user_id  text   NOT NULL,
    -- Empty: all.
    kinds    text[] NOT NULL,
    -- JSON of domain.preferences.QuietTimes.
    quiet    text   NOT NULL,
    PRIMARY KEY (store_id, user_id)
);

CREATE TABLE mutes (
    store_id        text NOT NULL,
    user_id         text NOT NULL,
    conversation_id text NOT NULL,
    -- Null: for good.
    until_time      timestamptz,
    PRIMARY KEY (store_id, user_id, conversation_id)
);
CREATE INDEX mutes_by_conversation ON mutes (store_id, conversation_id);

ALTER TABLE webhook_deliveries
    -- One that its user does not want is dead to the version before, which knows no other word.
    ADD COLUMN skipped boolean NOT NULL DEFAULT false,
    -- Its user has it sent again, whatever preferences say.
    ADD COLUMN resent boolean NOT NULL DEFAULT false;
