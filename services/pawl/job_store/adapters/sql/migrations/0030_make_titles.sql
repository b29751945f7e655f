-- The title that a model has made of a conversation, empty for none; when it is to be asked for one, null for never; of
-- which run that is to be; and how often it was asked.
ALTER TABLE conversations
    ADD COLUMN model_title text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN title_at timestamptz,
    ADD COLUMN title_run_id text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN title_attempts smallint NOT NULL DEFAULT 0;
CREATE INDEX conversations_untitled ON conversations (title_at) WHERE title_at IS NOT NULL;
