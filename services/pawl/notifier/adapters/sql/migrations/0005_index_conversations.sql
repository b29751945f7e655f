-- For erasures. Without a conversation is what the version before told approvers, so that is found by its run.
CREATE INDEX notifications_by_conversation ON notifications (store_id, conversation_id, run_id);
