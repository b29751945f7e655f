-- Several indexes of runs began with the store. Before a table has statistics the planner takes any of them for what
-- stands in the last column of another, and reads all runs of the store. So what differs most comes first: no other
-- lookup has a use for such an index, and it is the newest of those that cost the same.
-- So it is with the calls: each one that was looked up by its id was looked for among all of the store.
DROP INDEX IF EXISTS runs_by_id, runs_by_user, runs_by_user_in_state, runs_by_conversation, runs_by_parent;
DROP INDEX IF EXISTS runs_by_report, calls_by_id, calls_by_run, calls_open_by_run, calls_by_client;
CREATE UNIQUE INDEX CONCURRENTLY runs_by_id ON runs (run_id, store_id);
CREATE INDEX CONCURRENTLY runs_by_user ON runs (user_id, store_id, create_time, run_id);
CREATE INDEX CONCURRENTLY runs_by_user_in_state ON runs (user_id, store_id, state, create_time, run_id);
CREATE INDEX CONCURRENTLY runs_by_conversation ON runs (conversation_id, store_id, create_time, run_id);
CREATE INDEX CONCURRENTLY runs_by_parent ON runs (parent_run_id, store_id, create_time, run_id)
    WHERE parent_run_id <> '';
CREATE INDEX CONCURRENTLY runs_by_report ON runs (reports_to, store_id, create_time, run_id) WHERE reports_to <> '';
CREATE UNIQUE INDEX CONCURRENTLY calls_by_id ON calls (call_id, store_id);
CREATE INDEX CONCURRENTLY calls_by_run ON calls (run_id, store_id, round, batch_index, call_id);
CREATE INDEX CONCURRENTLY calls_open_by_run ON calls (run_id, store_id) WHERE state < 10;
CREATE INDEX CONCURRENTLY calls_by_client ON calls (offer_client_id, store_id, run_id, call_id)
    WHERE state = 3 AND offer_client_id <> '';
