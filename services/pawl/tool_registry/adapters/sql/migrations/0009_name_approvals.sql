-- The call whose approval made the rule; empty for none.
ALTER TABLE rules ADD COLUMN from_call_id text NOT NULL DEFAULT '';
