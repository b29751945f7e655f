-- Mailboxes whose mails fire triggers: when each is read next, the last mail that was, and since when it cannot be.
ALTER TABLE triggers
    ADD COLUMN claim_at timestamptz,                        -- null for webhooks, and while it is paused
    ADD COLUMN uid_validity bigint NOT NULL DEFAULT 0,
    ADD COLUMN last_uid bigint NOT NULL DEFAULT 0,
    ADD COLUMN unreachable_time timestamptz,
    ADD COLUMN unreachable_reason text NOT NULL DEFAULT '',
    ADD COLUMN unreachable_count integer NOT NULL DEFAULT 0;
CREATE INDEX triggers_claimable ON triggers (claim_at) WHERE claim_at IS NOT NULL;
