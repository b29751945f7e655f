-- Webhooks of a trigger that had no good signature or key: how many, and the last one.
ALTER TABLE triggers
    ADD COLUMN refused_count  bigint      NOT NULL DEFAULT 0,
    ADD COLUMN refused_time   timestamptz,
    ADD COLUMN refused_reason text        NOT NULL DEFAULT '';
