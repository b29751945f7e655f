-- While a table is small, or has no statistics yet, several indexes cost the planner the same for what is looked up by its
-- key, also some that begin with the store alone; it takes the newest, keeps the plan, and reads all of the store. So the
-- keys are the newest ones.
ALTER TABLE executions
    DROP CONSTRAINT executions_pkey, ADD CONSTRAINT executions_pkey PRIMARY KEY (store_id, call_id);
ALTER TABLE checkpoints
    DROP CONSTRAINT checkpoints_pkey, ADD CONSTRAINT checkpoints_pkey PRIMARY KEY (store_id, call_id);
ALTER TABLE worker_calls
    DROP CONSTRAINT worker_calls_pkey, ADD CONSTRAINT worker_calls_pkey PRIMARY KEY (store_id, call_id);
