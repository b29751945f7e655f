-- The tools that came with a run, for that run only; null for none.
ALTER TABLE runs ADD COLUMN own_tools bytea;
