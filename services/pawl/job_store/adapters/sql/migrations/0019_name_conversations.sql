-- What people call conversations, and find them by. `key_hash` is that of the key which the client chose, null if it
-- chose none; `made_title` is made of the first message, `title` given by the user, each empty for none. `parent_run_id`
-- is not empty for the conversation of a run that does a call of that one. Whoever takes a conversation from its user
-- takes its key, too, so that the key is free again.
ALTER TABLE conversations
    ADD COLUMN key_hash bytea,
    ADD COLUMN made_title text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN title text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN archived boolean NOT NULL DEFAULT false,
    ADD COLUMN parent_run_id text COLLATE "C" NOT NULL DEFAULT '';
-- Of two that begin a conversation with one key, on whatever replicas, the second comes too late and enters it.
CREATE UNIQUE INDEX conversations_key ON conversations (store_id, user_id, key_hash) WHERE key_hash IS NOT NULL;
-- For the list of a user, those first in which something happened last.
CREATE INDEX conversations_of_user ON conversations (store_id, user_id, archived, update_time, conversation_id)
    WHERE parent_run_id = '';
