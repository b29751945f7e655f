-- Receipts that a run has of commands that changed nothing.
ALTER TABLE runs ADD COLUMN idle_receipts integer NOT NULL DEFAULT 0;
