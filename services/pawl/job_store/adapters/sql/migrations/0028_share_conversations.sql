-- What other users of the store may do with a conversation: a number of pawl.event.v1.Sharing.
ALTER TABLE conversations
    ADD COLUMN sharing smallint NOT NULL DEFAULT 1,
    ADD COLUMN shows_arguments boolean NOT NULL DEFAULT false;
CREATE INDEX conversations_shared ON conversations (store_id, update_time, conversation_id) WHERE sharing > 1;
