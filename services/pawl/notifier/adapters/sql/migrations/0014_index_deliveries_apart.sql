-- As before: what is looked up has one index that fits, which begins with what differs most.
CREATE INDEX webhook_deliveries_of_notification ON webhook_deliveries (number, store_id, user_id);
DROP INDEX webhook_deliveries_by_notification;
