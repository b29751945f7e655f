-- Conversations that are being erased, or were: nobody's, as those that retention takes, with whose they were. The parts
-- are what is still to be done, and the root is the conversation for which it is erased, itself or that of a caller.
ALTER TABLE conversations
    ADD COLUMN erase_time timestamptz,
    ADD COLUMN erase_user_id text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN erase_root text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN erase_parts text[] NOT NULL DEFAULT '{}',
    ADD COLUMN erase_end_time timestamptz;
CREATE INDEX conversations_erasing ON conversations (erase_time, store_id, conversation_id) WHERE erase_parts <> '{}';
CREATE INDEX conversations_erased ON conversations (store_id, erase_root) WHERE erase_root <> '';
-- The ids of its runs (without a call) and calls, until all services have forgotten them; then only what has left.
CREATE TABLE erased_items (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    tool_name text COLLATE "C" NOT NULL,        -- empty unless it has left
    effect_class smallint NOT NULL,
    state smallint NOT NULL,
    start_time timestamptz,
    has_left boolean NOT NULL,
    PRIMARY KEY (store_id, conversation_id, run_id, call_id),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);
