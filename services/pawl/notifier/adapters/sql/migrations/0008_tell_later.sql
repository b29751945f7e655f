-- How long after a notification a webhook tells it, unless somebody has read it by then, or it is over.
ALTER TABLE webhooks ADD COLUMN after_seconds integer NOT NULL DEFAULT 0;
-- It has waited for its first try: for that, or for the end of quiet hours.
ALTER TABLE webhook_deliveries ADD COLUMN put_off boolean NOT NULL DEFAULT false;
-- When that for which somebody was needed went on without them.
ALTER TABLE notifications ADD COLUMN over_time timestamptz;
CREATE INDEX notifications_needed ON notifications (store_id, run_id)
    WHERE over_time IS NULL AND kind IN ('input_needed', 'attention_needed');
