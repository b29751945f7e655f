-- Triggers, which start runs of their users when something comes from outside. The definition and the last fires are
-- packed; of the runs they have ids alone. Secrets are needed to check signatures with, so they are no digests.
CREATE TABLE triggers (
    store_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    definition bytea NOT NULL,
    user_roles text NOT NULL,                   -- with commas between
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    people text NOT NULL,                       -- with commas between
    create_time timestamptz NOT NULL,
    pause_time timestamptz,
    pause_note text NOT NULL,
    self_paused boolean NOT NULL,
    failures integer NOT NULL,
    last_run_id text NOT NULL,                  -- empty for none
    last_run_counted boolean NOT NULL,
    fires bytea NOT NULL,
    secret bytea NOT NULL,
    former_secrets bytea NOT NULL,              -- packed, with the times until which they count
    PRIMARY KEY (store_id, trigger_id),
    UNIQUE (store_id, user_id, name)
);
-- The events that came lately: each one fires once.
CREATE TABLE trigger_events (
    store_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    receive_time timestamptz NOT NULL,
    fire_time timestamptz NOT NULL,
    outcome smallint NOT NULL,
    reason text NOT NULL,
    run_id text NOT NULL,
    conversation_id text NOT NULL,
    PRIMARY KEY (store_id, trigger_id, event_id),
    FOREIGN KEY (store_id, trigger_id) REFERENCES triggers ON DELETE CASCADE
);
CREATE INDEX trigger_events_old ON trigger_events (fire_time);
-- The events that wait for each other: one at most waits in each lane, from `claim_at` on to be fired.
CREATE TABLE trigger_lanes (
    store_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    lane text COLLATE "C" NOT NULL,
    last_run_id text NOT NULL,
    event_id text NOT NULL,                     -- empty for none, as all that follows
    data bytea NOT NULL,
    conversation_key text NOT NULL,
    awaits_run boolean NOT NULL,                -- it waits for the end of that run, and not for a time
    first_time timestamptz,
    claim_at timestamptz,
    update_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, trigger_id, lane),
    FOREIGN KEY (store_id, trigger_id) REFERENCES triggers ON DELETE CASCADE
);
CREATE INDEX trigger_lanes_claimable ON trigger_lanes (claim_at) WHERE claim_at IS NOT NULL;
CREATE INDEX trigger_lanes_old ON trigger_lanes (update_time);
