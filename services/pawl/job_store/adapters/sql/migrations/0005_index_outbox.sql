-- For the trim of logs, which asks of each run whether its end was sent, and for giving up what no stream has taken.
CREATE INDEX outbox_of_run ON outbox (store_id, run_id);
