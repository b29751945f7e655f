-- The digest of the `background` whose notices a conversation has counted. A replica of an older version changes only the
-- `background`: where the two differ it is counted again.
ALTER TABLE conversations ADD COLUMN counted_sha256 bytea;
CREATE INDEX conversations_not_counted ON conversations (store_id, conversation_id)
    WHERE counted_sha256 IS DISTINCT FROM sha256(background);
