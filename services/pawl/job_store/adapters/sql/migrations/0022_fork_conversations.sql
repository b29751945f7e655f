-- A fork: `fork_of` is the conversation that it was made of, empty for none, and its messages up to `past_number` stand
-- under others; 0 for one that has all its messages itself.
ALTER TABLE conversations
    ADD COLUMN fork_of text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN past_number bigint NOT NULL DEFAULT 0;
-- The past of a fork, never copied: its messages from `first_number` to `last_number` are those of
-- `source_conversation_id` with the same numbers. The path is flat: under each source stand messages of its own. It goes
-- with the fork. As long as a row names a source, nothing of that source is removed for its age that the row shows.
-- An empty source was erased: nothing stands there any more. Whoever erases a conversation locks it, and empties with it
-- in one transaction every row that names it; whoever adds a row has locked the source, and found it there.
CREATE TABLE conversation_segments (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    first_number bigint NOT NULL,
    last_number bigint NOT NULL,
    source_conversation_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (store_id, conversation_id, first_number),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);
CREATE INDEX conversation_segments_of_source ON conversation_segments (store_id, source_conversation_id, last_number);
-- What a request has made that made a conversation, and no run.
ALTER TABLE requests ADD COLUMN conversation_id text COLLATE "C" NOT NULL DEFAULT '';
