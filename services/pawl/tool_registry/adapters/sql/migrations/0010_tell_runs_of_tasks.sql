-- The run that made a task; empty where that was not written down.
ALTER TABLE tasks ADD COLUMN run_id text NOT NULL DEFAULT '';
