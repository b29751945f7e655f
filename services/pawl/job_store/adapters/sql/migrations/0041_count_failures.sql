-- The calls of an open job that were removed and had not succeeded.
ALTER TABLE runs ADD COLUMN trimmed_failures integer NOT NULL DEFAULT 0;
