-- The credential that started a run or sent a command, and the user of the delegate that acted for its user.
-- Empty for what was written before, and for no delegate.
ALTER TABLE runs
    ADD COLUMN credential_id text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN delegate_user_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE commands
    ADD COLUMN credential_id text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN delegate_user_id text COLLATE "C" NOT NULL DEFAULT '';
