-- Schedules, which start runs of their users at their times. The definition and the last fires are packed; of the runs
-- they have ids alone. `claim_at` is the time from which a schedule may be claimed to be fired: when it is due, or a
-- little later while somebody does that. Null: never, for it is paused or at its end.
CREATE TABLE schedules (
    store_id text COLLATE "C" NOT NULL,
    schedule_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    definition bytea NOT NULL,
    user_roles text NOT NULL,                   -- with commas between
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    people text NOT NULL,                       -- with commas between
    create_time timestamptz NOT NULL,
    due_time timestamptz,
    claim_at timestamptz,
    waiting_time timestamptz,                   -- the due time whose fire waits for the run before it
    pause_time timestamptz,
    pause_note text NOT NULL,
    self_paused boolean NOT NULL,
    failures integer NOT NULL,
    last_run_id text NOT NULL,                  -- empty for none
    last_run_counted boolean NOT NULL,
    fires bytea NOT NULL,
    PRIMARY KEY (store_id, schedule_id),
    UNIQUE (store_id, user_id, name)
);
CREATE INDEX schedules_claimable ON schedules (claim_at) WHERE claim_at IS NOT NULL;
