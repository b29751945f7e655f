-- The credential that saved a channel last, and the user of the delegate that did so; empty for those of the version before.
ALTER TABLE webhooks
    ADD COLUMN credential_id    text NOT NULL DEFAULT '',
    ADD COLUMN delegate_user_id text NOT NULL DEFAULT '';
