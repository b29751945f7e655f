-- The agent that drives a run; those from before agents were there are of the default. Labels are lines, each with the mark
-- of its owner, and indexed only where there are some: most steps of most runs touch neither.
ALTER TABLE runs
    ADD COLUMN agent_name text COLLATE "C" NOT NULL DEFAULT 'default',
    ADD COLUMN labels text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE conversations ADD COLUMN labels text COLLATE "C" NOT NULL DEFAULT '';
CREATE INDEX runs_labels ON runs USING gin (string_to_array(labels, E'\n')) WHERE labels <> '';
CREATE INDEX conversations_labels ON conversations USING gin (string_to_array(labels, E'\n')) WHERE labels <> '';
-- For lists of the runs of an agent, and of those that do calls of a run.
CREATE INDEX runs_of_agent ON runs (store_id, user_id, agent_name, create_time, run_id) WHERE agent_name <> 'default';
CREATE INDEX runs_of_parent ON runs (store_id, parent_run_id, create_time, run_id) WHERE parent_run_id <> '';
