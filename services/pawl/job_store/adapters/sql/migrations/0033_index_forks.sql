-- The conversation of `parent_run_id`, which may be gone before this one. Of those of the version before, that of a run
-- which is there.
ALTER TABLE conversations ADD COLUMN parent_conversation_id text COLLATE "C" NOT NULL DEFAULT '';
UPDATE conversations AS c SET parent_conversation_id = r.conversation_id FROM runs AS r
WHERE c.parent_run_id <> '' AND r.store_id = c.store_id AND r.run_id = c.parent_run_id;
-- For erasures.
CREATE INDEX conversations_below ON conversations (store_id, parent_conversation_id) WHERE parent_conversation_id <> '';
CREATE INDEX conversations_forks ON conversations (store_id, fork_of) WHERE fork_of <> '';
