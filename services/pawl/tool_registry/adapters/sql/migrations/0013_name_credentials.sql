-- The credential that started the run, the one of who decided, and the users of delegates that acted for either.
-- Empty for what was written before, which is hashed without them.
ALTER TABLE audit
    ADD COLUMN credential_id text NOT NULL DEFAULT '',
    ADD COLUMN delegate_user_id text NOT NULL DEFAULT '',
    ADD COLUMN by_credential_id text NOT NULL DEFAULT '',
    ADD COLUMN by_delegate_user_id text NOT NULL DEFAULT '';
