-- Sharing for writing: a version before this one takes it for sharing for reading. Messages of runs of others than the
-- user of their conversation say whose they are.
ALTER TABLE conversations ADD COLUMN writable boolean NOT NULL DEFAULT false;
ALTER TABLE messages ADD COLUMN user_id text COLLATE "C" NOT NULL DEFAULT '';
