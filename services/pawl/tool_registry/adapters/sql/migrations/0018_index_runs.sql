-- For erasing what was executed for jobs: of those that go on for long the ledger does not name all calls.
CREATE INDEX executions_of_run ON executions (store_id, run_id);
