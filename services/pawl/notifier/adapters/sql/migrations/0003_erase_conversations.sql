-- Erased conversations, for a while: whatever is still on its way about them is told to nobody.
CREATE TABLE erased_conversations (
    store_id        text        NOT NULL,
    conversation_id text        NOT NULL,
    erase_time      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, conversation_id)
);
CREATE INDEX erased_conversations_old ON erased_conversations (erase_time);
