-- What is looked up has one index that fits, which begins with what differs most: planned before there were statistics,
-- all calls that workers hold were read for those of one, all of a store for those of a run, and all changes of a user, or
-- of a store, for one.
DROP INDEX IF EXISTS worker_calls_by_id, worker_calls_by_group, worker_calls_by_worker, worker_calls_by_run;
DROP INDEX IF EXISTS executions_by_id, executions_by_run, plan_changes_by_key;
CREATE UNIQUE INDEX CONCURRENTLY worker_calls_by_id ON worker_calls (call_id, store_id);
CREATE INDEX CONCURRENTLY worker_calls_by_group ON worker_calls (group_name, store_id) WHERE state = 'WAITING';
CREATE INDEX CONCURRENTLY worker_calls_by_worker ON worker_calls (worker_id, group_name, store_id, call_id)
    WHERE state = 'HELD';
CREATE INDEX CONCURRENTLY worker_calls_by_run ON worker_calls (run_id, store_id);
CREATE UNIQUE INDEX CONCURRENTLY executions_by_id ON executions (call_id, store_id);
CREATE INDEX CONCURRENTLY executions_by_run ON executions (run_id, store_id);
CREATE UNIQUE INDEX CONCURRENTLY plan_changes_by_key ON plan_changes (idempotency_key, store_id, user_id);
