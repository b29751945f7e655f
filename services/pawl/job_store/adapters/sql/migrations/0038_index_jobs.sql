-- The jobs of a user, among however many other runs.
CREATE INDEX runs_jobs_of_user ON runs (store_id, user_id, create_time, run_id) WHERE reports_to <> '';
