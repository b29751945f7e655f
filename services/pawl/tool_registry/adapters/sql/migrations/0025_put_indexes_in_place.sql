-- The indexes of before make room for those that were built.
ALTER TABLE executions
    DROP CONSTRAINT executions_pkey, ADD CONSTRAINT executions_pkey PRIMARY KEY USING INDEX executions_by_id;
DROP INDEX executions_of_run;
ALTER INDEX executions_by_run RENAME TO executions_of_run;
ALTER TABLE worker_calls
    DROP CONSTRAINT worker_calls_pkey, ADD CONSTRAINT worker_calls_pkey PRIMARY KEY USING INDEX worker_calls_by_id;
DROP INDEX worker_calls_waiting, worker_calls_held, worker_calls_run;
ALTER INDEX worker_calls_by_group RENAME TO worker_calls_waiting;
ALTER INDEX worker_calls_by_worker RENAME TO worker_calls_held;
ALTER INDEX worker_calls_by_run RENAME TO worker_calls_run;
ALTER TABLE plan_changes
    DROP CONSTRAINT plan_changes_pkey, ADD CONSTRAINT plan_changes_pkey PRIMARY KEY USING INDEX plan_changes_by_key;
