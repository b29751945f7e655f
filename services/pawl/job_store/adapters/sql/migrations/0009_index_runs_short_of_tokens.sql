-- For the inboxes of stores: the runs that wait for a top-up, and for nothing else (WAITING, WAIT_KIND_BUDGET).
CREATE INDEX runs_short_of_tokens ON runs (store_id, create_time, run_id) WHERE state = 3 AND waits = '\x04';
