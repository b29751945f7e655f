-- Messages that have entered a run and do not stand in its conversation yet; when the progress of a call was last told.
ALTER TABLE runs
    ADD COLUMN steers_waiting integer NOT NULL DEFAULT 0,
    ADD COLUMN steer_bytes_waiting bigint NOT NULL DEFAULT 0;
ALTER TABLE calls
    ADD COLUMN progress_time timestamptz;
