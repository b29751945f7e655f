-- Runs of the background, jobs and what they begin, have places of their own.
ALTER TABLE runs ADD COLUMN in_background boolean NOT NULL DEFAULT false;
UPDATE runs SET in_background = true WHERE reports_to <> '';
CREATE INDEX runs_background ON runs (store_id, claim_at) WHERE in_background AND claim_at IS NOT NULL AND NOT active;
