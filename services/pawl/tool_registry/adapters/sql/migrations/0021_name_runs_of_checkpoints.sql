-- The run of what is kept of a call: the ledger does not name the old iterations of a job that it has let go, and they
-- are erased with their run all the same. Empty in rows from before.
ALTER TABLE checkpoints ADD COLUMN run_id text NOT NULL DEFAULT '';
ALTER TABLE worker_calls ADD COLUMN run_id text NOT NULL DEFAULT '';

CREATE INDEX checkpoints_run ON checkpoints (store_id, run_id);
