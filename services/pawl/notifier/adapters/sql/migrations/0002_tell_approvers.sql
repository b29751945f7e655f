-- What is for those who approve in the store, and the call that it is about. Of the version before, none.
ALTER TABLE notifications
    ADD COLUMN for_approvers boolean NOT NULL DEFAULT false,
    ADD COLUMN call_id text NOT NULL DEFAULT '';

-- Users who have called with a role that approves, and when they did last.
CREATE TABLE approvers (
    store_id  text        NOT NULL,
    user_id   text        NOT NULL,
    seen_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, user_id)
);
CREATE INDEX approvers_by_time ON approvers (store_id, seen_time);
