-- The words of messages, by the number of the message, and of titles that users gave, under number 0. Each begins with a
-- mark of its owner, so that a search looks at nothing of others, however common a word is. They are taken in after the
-- messages were written, and go with them.
CREATE TABLE conversation_words (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    words tsvector NOT NULL,
    PRIMARY KEY (store_id, conversation_id, number),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);
CREATE INDEX conversation_words_search ON conversation_words USING gin (words);
-- Up to which message, and with which title, a conversation can be found. Those from before are taken in by and by.
ALTER TABLE conversations
    ADD COLUMN searched_number bigint NOT NULL DEFAULT 0,
    ADD COLUMN searched_title text COLLATE "C" NOT NULL DEFAULT '';
CREATE INDEX conversations_unsearched ON conversations (update_time)
    WHERE parent_run_id = '' AND (searched_number < last_number OR searched_title <> title);
