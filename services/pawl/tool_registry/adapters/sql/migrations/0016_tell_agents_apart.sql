-- The agent of the run; empty for what was written before, which is hashed without it.
ALTER TABLE audit ADD COLUMN agent_name text NOT NULL DEFAULT '';
-- The agent of a rule for one. Its scope and scope_id are such that a registry that does not know of this column lets no
-- more calls run: STORE for a rule that denies or asks, RUN without an id, which no run has, for one that allows.
ALTER TABLE rules ADD COLUMN agent_name text NOT NULL DEFAULT '';
