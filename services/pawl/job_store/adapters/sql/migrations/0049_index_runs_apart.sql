-- Several indexes of runs began with the store. Before a table has statistics the planner takes any of them for what
-- stands in the last column of another, and reads all runs of the store. So what differs most comes first: no other
-- lookup has a use for such an index, and it is the newest of those that cost the same.
ALTER TABLE runs
    DROP CONSTRAINT runs_pkey, ADD CONSTRAINT runs_pkey PRIMARY KEY (run_id, store_id);
DROP INDEX runs_of_user, runs_of_user_in_state, runs_of_conversation, runs_of_parent, runs_jobs;
CREATE INDEX runs_of_user ON runs (user_id, store_id, create_time, run_id);
CREATE INDEX runs_of_user_in_state ON runs (user_id, store_id, state, create_time, run_id);
CREATE INDEX runs_of_conversation ON runs (conversation_id, store_id, create_time, run_id);
CREATE INDEX runs_of_parent ON runs (parent_run_id, store_id, create_time, run_id) WHERE parent_run_id <> '';
CREATE INDEX runs_jobs ON runs (reports_to, store_id, create_time, run_id) WHERE reports_to <> '';
-- So it is with the calls: each one that was looked up by its id was looked for among all of the store.
ALTER TABLE calls
    DROP CONSTRAINT calls_pkey, ADD CONSTRAINT calls_pkey PRIMARY KEY (call_id, store_id);
DROP INDEX calls_of_run, calls_open, calls_held;
CREATE INDEX calls_of_run ON calls (run_id, store_id, round, batch_index, call_id);
CREATE INDEX calls_open ON calls (run_id, store_id) WHERE state < 10;
CREATE INDEX calls_held ON calls (offer_client_id, store_id, run_id, call_id)
    WHERE state = 3 AND offer_client_id <> '';
