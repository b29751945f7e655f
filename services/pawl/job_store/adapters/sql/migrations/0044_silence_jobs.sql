-- A job that tells its conversation nothing, not even its end.
ALTER TABLE runs ADD COLUMN silent boolean NOT NULL DEFAULT false;
