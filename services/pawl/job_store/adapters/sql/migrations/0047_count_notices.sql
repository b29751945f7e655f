-- What jobs tell a conversation, as `background` has it: notices of which no model was told, and those that it was told
-- and has not answered. Those of before are counted with the next change.
ALTER TABLE conversations
    ADD COLUMN notices_pending integer NOT NULL DEFAULT 0,
    ADD COLUMN notices_entered integer NOT NULL DEFAULT 0;
CREATE INDEX conversations_notices ON conversations (notices_pending, notices_entered)
    WHERE notices_pending + notices_entered > 0 AND user_id <> '';
