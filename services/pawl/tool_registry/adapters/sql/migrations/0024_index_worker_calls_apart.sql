-- What is looked up has one index that fits, which begins with what differs most: planned before there were statistics,
-- all calls that workers hold were read for those of one, and all of a store for those of a run.
ALTER TABLE worker_calls
    DROP CONSTRAINT worker_calls_pkey, ADD CONSTRAINT worker_calls_pkey PRIMARY KEY (call_id, store_id);
DROP INDEX worker_calls_waiting, worker_calls_held, worker_calls_run;
CREATE INDEX worker_calls_waiting ON worker_calls (group_name, store_id) WHERE state = 'WAITING';
CREATE INDEX worker_calls_held ON worker_calls (worker_id, group_name, store_id, call_id) WHERE state = 'HELD';
CREATE INDEX worker_calls_run ON worker_calls (run_id, store_id);
