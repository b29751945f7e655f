-- For erasing, which asks for the calls of runs whose calls the ledger does not name.
CREATE INDEX worker_calls_run ON worker_calls (store_id, run_id);
