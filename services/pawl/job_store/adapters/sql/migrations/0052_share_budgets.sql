-- The run on whose token budget a run draws, empty for its own; there, what all of them have used.
ALTER TABLE runs ADD COLUMN budget_run_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN shared_tokens_used bigint NOT NULL DEFAULT 0;
