-- An e-mail is a webhook whose URL is mailto: and its address: what the version before makes of one is refused as it is
-- sent, and tried again.
ALTER TABLE webhooks
    -- When its address was confirmed; null before, and for all that is no e-mail.
    ADD COLUMN confirm_time timestamptz,
    -- When the code was made that confirms it, and the tries with another one since.
    ADD COLUMN code_time timestamptz,
    ADD COLUMN code_tries integer NOT NULL DEFAULT 0;

-- Codes that were sent within the last day, also to channels that are gone.
CREATE TABLE codes_sent (
    address   text        NOT NULL,
    store_id  text        NOT NULL,
    user_id   text        NOT NULL,
    sent_time timestamptz NOT NULL DEFAULT now()
);

-- For how many e-mails a user was sent lately.
CREATE INDEX webhook_deliveries_tried ON webhook_deliveries (store_id, user_id, try_time) WHERE try_time IS NOT NULL;
