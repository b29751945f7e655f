-- The ledger. Every key starts with the store. Columns of type bytea are opaque to SQL:
-- parts of messages of the contract, or free text, which may hold what PostgreSQL's text cannot.
-- States are the numbers of pawl.event.v1; terminal ones start at 10.

CREATE TABLE conversations (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    active_run_id text COLLATE "C",
    queue text COLLATE "C" NOT NULL,          -- ids of the runs that wait for their turn, with commas between
    last_number bigint NOT NULL,
    create_time timestamptz NOT NULL,
    update_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, conversation_id)
);
-- For the retention sweep.
CREATE INDEX conversations_idle ON conversations (update_time) WHERE active_run_id IS NULL;

CREATE TABLE messages (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    summarised_to bigint NOT NULL,            -- over 0 for a summary: the last message that it stands for
    body bytea NOT NULL,
    create_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, conversation_id, number)
);
CREATE INDEX messages_summaries ON messages (store_id, conversation_id, summarised_to) WHERE summarised_to > 0;

CREATE TABLE runs (
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    state smallint NOT NULL,
    waits bytea NOT NULL,                     -- one byte a kind
    stop_cause smallint,
    epoch bigint NOT NULL,
    worker_id text COLLATE "C",
    claim_at timestamptz,
    crashes integer NOT NULL,
    attention smallint,                       -- why an operator is wanted
    attention_time timestamptz,
    last_seq bigint NOT NULL,
    trimmed_seq bigint NOT NULL DEFAULT 0,    -- events up to this one were removed
    command_count integer NOT NULL,
    round integer NOT NULL,
    active_seconds double precision NOT NULL,
    token_budget bigint NOT NULL,             -- with all top-ups; 0 for none
    token_ceiling bigint NOT NULL,            -- what top-ups can raise it to; 0 for anything
    last_commit bytea,
    queued_message bytea,
    options bytea NOT NULL,
    tools bytea NOT NULL,
    usage bytea NOT NULL,
    failure bytea NOT NULL,
    unstopped bytea NOT NULL,                 -- calls that could not be stopped
    output bytea NOT NULL,
    loop_state bytea NOT NULL DEFAULT '',
    create_time timestamptz NOT NULL,
    start_time timestamptz,
    end_time timestamptz,
    -- Whether it takes a place: a worker has it or had it when it crashed, or it is RUNNING or CANCELLING.
    active boolean NOT NULL GENERATED ALWAYS AS (worker_id IS NOT NULL OR state IN (2, 4)) STORED,
    PRIMARY KEY (store_id, run_id)
) WITH (fillfactor = 80);                     -- most steps change no indexed column and stay on their page
-- What a worker may claim, now or later; the loose scan over stores and the claim itself read only this.
CREATE INDEX runs_claimable ON runs (store_id, claim_at) WHERE claim_at IS NOT NULL;
CREATE INDEX runs_of_worker ON runs (worker_id, store_id, run_id) WHERE worker_id IS NOT NULL;
CREATE INDEX runs_of_user ON runs (store_id, user_id, create_time, run_id);
CREATE INDEX runs_of_conversation ON runs (store_id, conversation_id, create_time, run_id);
-- For the retention sweep.
CREATE INDEX runs_untrimmed ON runs (end_time) WHERE trimmed_seq = 0 AND end_time IS NOT NULL;
-- For counts, and for the queue of a store.
CREATE INDEX runs_open ON runs (state, store_id) WHERE state < 10;
-- The places that are taken, and by user what waits for one.
CREATE INDEX runs_active ON runs (store_id, user_id, claim_at) WHERE active;
CREATE INDEX runs_waiting ON runs (store_id, user_id, claim_at) WHERE claim_at IS NOT NULL AND NOT active;
-- Few: runs whose workers died, which are claimed with care, and runs that wait for an operator.
CREATE INDEX runs_crashed ON runs (claim_at) WHERE claim_at IS NOT NULL AND crashes > 0;
CREATE INDEX runs_attention ON runs (store_id, attention_time, run_id) WHERE attention IS NOT NULL;

CREATE TABLE calls (
    store_id text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    round integer NOT NULL,
    batch_index integer NOT NULL,
    state smallint NOT NULL,
    tool_name bytea NOT NULL,
    tool_version integer NOT NULL,
    fallback_tool_name bytea NOT NULL,
    arguments bytea NOT NULL,
    attempt integer NOT NULL,
    digest text COLLATE "C" NOT NULL,
    decision bytea,
    deadline_time timestamptz,
    offer_client_id text COLLATE "C",         -- null if never offered, empty if nobody holds it
    offer_session_id text COLLATE "C" NOT NULL,
    offer_epoch bigint NOT NULL,
    offer_expire_time timestamptz,
    offer_lease_seconds double precision NOT NULL,
    reserved_by text COLLATE "C" NOT NULL,
    result bytea,
    spec bytea NOT NULL,
    create_time timestamptz NOT NULL,
    start_time timestamptz,
    end_time timestamptz,
    PRIMARY KEY (store_id, call_id)
);
CREATE INDEX calls_of_run ON calls (store_id, run_id, round, batch_index, call_id);
CREATE INDEX calls_open ON calls (store_id, run_id) WHERE state < 10;
CREATE INDEX calls_pending ON calls (store_id, user_id, create_time, call_id)
    WHERE state IN (2, 3, 4, 6) AND reserved_by = '';
CREATE INDEX calls_held ON calls (store_id, offer_client_id) WHERE state = 3 AND offer_client_id <> '';
CREATE INDEX calls_held_until ON calls (offer_expire_time) WHERE state = 3 AND offer_client_id <> '';

CREATE TABLE commands (
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    command_id text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    "time" timestamptz NOT NULL,
    name text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    outcome smallint NOT NULL,
    reason text COLLATE "C" NOT NULL,
    message text COLLATE "C" NOT NULL,
    payload bytea NOT NULL,
    consumed boolean NOT NULL,
    PRIMARY KEY (store_id, run_id, command_id)
);
CREATE INDEX commands_unread ON commands (store_id, run_id, number) WHERE NOT consumed;

CREATE TABLE events (
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    payload bytea NOT NULL,                   -- the whole RunEvent, so that all watchers get the same bytes
    PRIMARY KEY (store_id, run_id, seq)
);

CREATE TABLE requests (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    steered boolean NOT NULL,
    create_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, user_id, request_id)
);
CREATE INDEX requests_old ON requests (create_time);

-- Life-cycle events that JetStream has not acknowledged yet; the payload is that of the event.
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    "time" timestamptz NOT NULL
);

-- Those that it has acknowledged, for a while: it may lose them.
CREATE TABLE sent (
    id bigint PRIMARY KEY,
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    "time" timestamptz NOT NULL,
    sent_time timestamptz NOT NULL DEFAULT now(),
    stream_create_time timestamptz NOT NULL,  -- which stream acknowledged it
    stream_seq bigint NOT NULL
);
CREATE INDEX sent_old ON sent (sent_time);
