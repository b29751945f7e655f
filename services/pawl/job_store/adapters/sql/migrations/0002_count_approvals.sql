-- Calls that several people approve, requests that are escalated, questions with an answer for the case of none.
ALTER TABLE calls
    ADD COLUMN approvals_required smallint NOT NULL DEFAULT 1,
    ADD COLUMN approvals bytea,               -- null for none
    ADD COLUMN escalated boolean NOT NULL DEFAULT false,
    ADD COLUMN has_default boolean NOT NULL DEFAULT false;
-- What those who approve for the whole store are shown.
CREATE INDEX calls_to_approve ON calls (store_id, create_time, call_id) WHERE state = 2 AND reserved_by = '';
