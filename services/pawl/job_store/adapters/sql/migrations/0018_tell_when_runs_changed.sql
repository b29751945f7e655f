-- When the last event of a run was written, when it last got somewhere, when it last changed its state or what it waits
-- for, and when a call came into its state. Null for what was written before this was known.
ALTER TABLE runs
    ADD COLUMN update_time timestamptz,
    ADD COLUMN progress_time timestamptz,
    ADD COLUMN state_time timestamptz;
ALTER TABLE calls ADD COLUMN state_time timestamptz;
