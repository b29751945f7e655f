-- For what is due of each webhook.
CREATE INDEX webhook_deliveries_due_of_webhook ON webhook_deliveries (webhook_id, due_time) WHERE due_time IS NOT NULL;
-- For its tests.
CREATE INDEX webhook_deliveries_tests_of_webhook ON webhook_deliveries (webhook_id, insert_time) WHERE number IS NULL;
