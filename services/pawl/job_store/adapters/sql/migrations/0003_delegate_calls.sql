-- Runs that do calls of other runs. Empty for none.
ALTER TABLE runs
    ADD COLUMN parent_run_id text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN parent_call_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE calls
    ADD COLUMN child_run_id text COLLATE "C" NOT NULL DEFAULT '';
