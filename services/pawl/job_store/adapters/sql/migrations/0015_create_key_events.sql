-- Events of API keys, and sums of failed logins. Rows are added and never changed, and removed when they are old: by the
-- function below alone, so that a role that may only read and add cannot remove any before its time.
CREATE TABLE key_events (
    event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    "time" timestamptz NOT NULL,
    kind text NOT NULL,
    store_id text NOT NULL,                     -- empty for those of the deployment, and where no key is known
    key_id text NOT NULL,                       -- and what follows, as the key was then
    key_name text NOT NULL,
    user_id text NOT NULL,
    roles text[] NOT NULL,
    by_store_id text NOT NULL,
    by_user_id text NOT NULL,
    by_delegate_user_id text NOT NULL,
    by_credential_id text NOT NULL,
    service text NOT NULL,
    report_id text NOT NULL,                    -- empty for what is no failed login, as what follows
    failure_kind text,
    source text,
    failure_count bigint,
    first_time timestamptz,
    last_time timestamptz
);
CREATE INDEX key_events_by_time ON key_events ("time");
CREATE INDEX key_events_of_store ON key_events (store_id, event_id);
CREATE INDEX key_events_of_key ON key_events (key_id, event_id) WHERE key_id <> '';
CREATE INDEX key_events_of_kind ON key_events (kind, event_id);
CREATE UNIQUE INDEX key_events_by_report ON key_events (report_id) WHERE report_id <> '';

-- Removes up to so many events that are older than 90 days, and as many of failed logins but for the last 100,000;
-- returns how many. With the rights of who owns the table, whoever calls.
CREATE FUNCTION remove_old_key_events(rows_max integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        DELETE FROM job_store.key_events WHERE event_id IN (
            (SELECT event_id FROM job_store.key_events WHERE "time" < now() - interval '90 days'
            ORDER BY "time" LIMIT rows_max)
            UNION
            (SELECT event_id FROM job_store.key_events WHERE kind = 'LOGINS_FAILED' AND event_id <= (
                SELECT event_id FROM job_store.key_events WHERE kind = 'LOGINS_FAILED'
                ORDER BY event_id DESC OFFSET 100000 LIMIT 1
            ) ORDER BY event_id LIMIT rows_max)
        ) RETURNING event_id
    )
    SELECT count(*) FROM gone
$$;
