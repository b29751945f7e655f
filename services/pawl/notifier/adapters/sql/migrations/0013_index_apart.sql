-- Several indexes began with the store. Before a table has statistics the planner takes any of them for what stands in
-- the last column of another, and reads all notifications of a user or a store. Now one index fits each lookup.
CREATE UNIQUE INDEX notifications_by_id ON notifications (notification_id, store_id, user_id);
ALTER TABLE notifications DROP CONSTRAINT notifications_store_id_user_id_notification_id_key;
CREATE INDEX notifications_of_conversation ON notifications (conversation_id, run_id, store_id);
DROP INDEX notifications_by_conversation;
