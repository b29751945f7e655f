-- Jobs: runs that go on in the background and report to a conversation, and turns of the model that their notices begin.
ALTER TABLE runs
    ADD COLUMN reports_to text NOT NULL DEFAULT '' COLLATE "C",
    ADD COLUMN generation integer NOT NULL DEFAULT 0;
-- What is going on in the background of a conversation, packed; null for nothing.
ALTER TABLE conversations
    ADD COLUMN background bytea;
-- The open jobs of a conversation.
CREATE INDEX runs_jobs ON runs (store_id, reports_to, create_time) WHERE reports_to <> '';
