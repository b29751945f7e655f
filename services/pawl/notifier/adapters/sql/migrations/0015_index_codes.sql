-- All codes that anybody was sent were read for each one.
CREATE INDEX codes_sent_of_address ON codes_sent (lower(address), sent_time);
CREATE INDEX codes_sent_of_store ON codes_sent (store_id, sent_time);
CREATE INDEX codes_sent_old ON codes_sent (sent_time);
