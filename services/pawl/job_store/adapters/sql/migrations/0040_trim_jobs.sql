-- Of an open job the last iterations are kept. Rounds whose calls were removed, and up to where the log was then; and
-- the place up to which they go next. `trimmed_seq` is of runs that have ended.
ALTER TABLE runs
    ADD COLUMN trimmed_rounds integer NOT NULL DEFAULT 0,
    ADD COLUMN trimmed_log_seq bigint NOT NULL DEFAULT 0,
    ADD COLUMN mark_round integer NOT NULL DEFAULT 0,
    ADD COLUMN mark_seq bigint NOT NULL DEFAULT 0;
