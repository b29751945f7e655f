-- As before, for the calls.
ALTER TABLE calls DROP CONSTRAINT calls_pkey, ADD CONSTRAINT calls_pkey PRIMARY KEY USING INDEX calls_by_id;
DROP INDEX calls_of_run, calls_open, calls_held;
ALTER INDEX calls_by_run RENAME TO calls_of_run;
ALTER INDEX calls_open_by_run RENAME TO calls_open;
ALTER INDEX calls_by_client RENAME TO calls_held;
