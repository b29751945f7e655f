-- What the audit says of a call; null from a process of the version before, or where a worker is only asked about it.
-- And the hand-outs of which a late result needs no entry: they have one, or were such questions.
ALTER TABLE worker_calls ADD COLUMN origin bytea, ADD COLUMN told_epochs bigint[] NOT NULL DEFAULT '{}';
