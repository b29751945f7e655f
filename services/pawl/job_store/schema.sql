-- The ledger. Every key starts with the store. bytea columns are opaque to SQL: parts of contract messages, or free
-- text, which may hold characters that PostgreSQL's text cannot. States are the numbers of pawl.event.v1; terminal
-- states start at 10.
CREATE TABLE conversations (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    active_run_id text COLLATE "C",
    queue text COLLATE "C" NOT NULL,  -- ids of the queued runs, comma-separated
    last_number bigint NOT NULL,
    create_time timestamptz NOT NULL,
    update_time timestamptz NOT NULL,
    -- Queued runs whose message arrived with INTERRUPT, in the format of `queue`.
    interrupting text COLLATE "C" NOT NULL DEFAULT '',
    -- `key_hash` is the hash of the client's conversation key, null if it has none. `made_title` comes from the first
    -- message, `title` from the user; both may be empty. `parent_run_id` names the calling run in the conversation of a
    -- delegated run. Removing the user also removes the key, so that it can be used again.
    key_hash bytea,
    made_title text COLLATE "C" NOT NULL DEFAULT '',
    title text COLLATE "C" NOT NULL DEFAULT '',
    archived boolean NOT NULL DEFAULT false,
    parent_run_id text COLLATE "C" NOT NULL DEFAULT '',
    -- The last message and the title that search has indexed. A background task indexes the rest.
    searched_number bigint NOT NULL DEFAULT 0,
    searched_title text COLLATE "C" NOT NULL DEFAULT '',
    -- A fork: the source conversation (empty for none). Messages up to `past_number` belong to the sources in
    -- conversation_segments; 0 for a conversation that owns all its messages.
    fork_of text COLLATE "C" NOT NULL DEFAULT '',
    past_number bigint NOT NULL DEFAULT 0,
    -- Erasure. An erased conversation has no user; `erase_user_id` keeps the former one. `erase_parts` are the steps
    -- that remain. `erase_root` is the conversation whose erasure includes this one: itself or that of a caller.
    erase_time timestamptz,
    erase_user_id text COLLATE "C" NOT NULL DEFAULT '',
    erase_root text COLLATE "C" NOT NULL DEFAULT '',
    erase_parts text[] NOT NULL DEFAULT '{}',
    erase_end_time timestamptz,
    labels text COLLATE "C" NOT NULL DEFAULT '',
    -- Access of other users of the store: a number of pawl.event.v1.Sharing.
    sharing smallint NOT NULL DEFAULT 1,
    shows_arguments boolean NOT NULL DEFAULT false,
    -- A model-generated title (empty if there is none), when to request one (null for never), from which run, and how
    -- often it was requested.
    model_title text COLLATE "C" NOT NULL DEFAULT '',
    title_at timestamptz,
    title_run_id text COLLATE "C" NOT NULL DEFAULT '',
    title_attempts smallint NOT NULL DEFAULT 0,
    -- The conversation of `parent_run_id`, which may be deleted before this one.
    parent_conversation_id text COLLATE "C" NOT NULL DEFAULT '',
    -- Background state, packed; null for none.
    background bytea,
    -- Notices in `background`: not yet sent to a model; sent and not yet answered.
    notices_pending integer NOT NULL DEFAULT 0,
    notices_entered integer NOT NULL DEFAULT 0,
    PRIMARY KEY (store_id, conversation_id)
);
-- For erasure.
CREATE INDEX conversations_below ON conversations (store_id, parent_conversation_id)
    WHERE parent_conversation_id <> '';
CREATE INDEX conversations_erased ON conversations (store_id, erase_root) WHERE erase_root <> '';
CREATE INDEX conversations_erasing ON conversations (erase_time, store_id, conversation_id)
    WHERE erase_parts <> '{}';
CREATE INDEX conversations_forks ON conversations (store_id, fork_of) WHERE fork_of <> '';
-- For the retention sweep.
CREATE INDEX conversations_idle ON conversations (store_id, update_time) WHERE active_run_id IS NULL;
-- Two concurrent creations with one key end up in one conversation.
CREATE UNIQUE INDEX conversations_key ON conversations (store_id, user_id, key_hash) WHERE key_hash IS NOT NULL;
CREATE INDEX conversations_labels ON conversations USING gin (string_to_array(labels, E'\n')) WHERE labels <> '';
CREATE INDEX conversations_notices ON conversations (notices_pending, notices_entered)
    WHERE (notices_pending + notices_entered) > 0 AND user_id <> '';
-- A user's conversations, the most recently changed first.
CREATE INDEX conversations_of_user ON conversations (store_id, user_id, archived, update_time, conversation_id)
    WHERE parent_run_id = '';
CREATE INDEX conversations_shared ON conversations (store_id, update_time, conversation_id) WHERE sharing > 1;
CREATE INDEX conversations_unsearched ON conversations (update_time)
    WHERE (parent_run_id = '') AND ((searched_number < last_number) OR (searched_title <> title));
CREATE INDEX conversations_untitled ON conversations (title_at) WHERE title_at IS NOT NULL;

CREATE TABLE messages (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    summarised_to bigint NOT NULL,  -- over 0 for a summary: the last message that it covers
    body bytea NOT NULL,
    create_time timestamptz NOT NULL,
    swept boolean NOT NULL DEFAULT false,  -- a summary whose older runs retention has removed
    user_id text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, conversation_id, number)
);
CREATE INDEX messages_summaries ON messages (store_id, conversation_id, summarised_to) WHERE summarised_to > 0;
CREATE INDEX messages_unswept ON messages (store_id, create_time) WHERE summarised_to > 0 AND NOT swept;

CREATE TABLE runs (
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    state smallint NOT NULL,
    waits bytea NOT NULL,  -- one byte per wait kind
    stop_cause smallint,
    epoch bigint NOT NULL,
    worker_id text COLLATE "C",
    claim_at timestamptz,
    crashes integer NOT NULL,
    attention smallint,  -- why an operator is needed
    attention_time timestamptz,
    last_seq bigint NOT NULL,
    -- No reader gets events up to this one. Their rows are removed, except one that also has later events.
    trimmed_seq bigint NOT NULL DEFAULT 0,
    command_count integer NOT NULL,
    round integer NOT NULL,
    active_seconds double precision NOT NULL,
    token_budget bigint NOT NULL,  -- including top-ups; 0 for none
    token_ceiling bigint NOT NULL,  -- the most that top-ups can raise it to; 0 for no limit
    last_commit bytea,
    queued_message bytea,
    options bytea NOT NULL,
    tools bytea NOT NULL,
    usage bytea NOT NULL,
    failure bytea NOT NULL,
    unstopped bytea NOT NULL,  -- calls that could not be stopped
    output bytea NOT NULL,
    loop_state bytea NOT NULL DEFAULT '',
    create_time timestamptz NOT NULL,
    start_time timestamptz,
    end_time timestamptz,
    -- Whether the run uses a slot: a worker holds it or held it when it crashed, or it is RUNNING or CANCELLING.
    active boolean NOT NULL GENERATED ALWAYS AS (worker_id IS NOT NULL OR state IN (2, 4)) STORED,
    parent_run_id text COLLATE "C" NOT NULL DEFAULT '',  -- set for a delegated run; otherwise empty
    parent_call_id text COLLATE "C" NOT NULL DEFAULT '',
    -- Messages that have entered the run and are not yet in its conversation; of a workflow, events that no node took.
    steers_waiting integer NOT NULL DEFAULT 0,
    steer_bytes_waiting bigint NOT NULL DEFAULT 0,
    idle_receipts integer NOT NULL DEFAULT 0,  -- receipts of commands that changed nothing
    -- The credential that started the run, and the user of the delegate that acted (empty for none).
    credential_id text COLLATE "C" NOT NULL DEFAULT '',
    delegate_user_id text COLLATE "C" NOT NULL DEFAULT '',
    -- Other users who took part in starting the run, comma-separated. They do not count as a second approver.
    people text COLLATE "C" NOT NULL DEFAULT '',
    -- Other users whose messages entered the run, comma-separated. They do not count as a second approver.
    steered_by text COLLATE "C" NOT NULL DEFAULT '',
    -- When the last event was written, when the run last made progress, and when its state or wait last changed.
    update_time timestamptz NOT NULL,
    progress_time timestamptz,
    state_time timestamptz NOT NULL,
    -- The placeholder run of an imported history. It never ran here and no list shows it.
    imported boolean NOT NULL DEFAULT false,
    own_tools bytea,  -- tools that came with this run only; null for none
    trace text COLLATE "C" NOT NULL DEFAULT '',  -- the trace context for work that the run causes
    -- Labels are lines, each prefixed with its owner's mark, and indexed only where set: most updates touch neither
    -- column.
    agent_name text COLLATE "C" NOT NULL DEFAULT 'default',
    labels text COLLATE "C" NOT NULL DEFAULT '',
    -- The conversation that a job reports to; empty otherwise. `generation` counts the turns started by notices that lead
    -- to this run.
    reports_to text COLLATE "C" NOT NULL DEFAULT '',
    generation integer NOT NULL DEFAULT 0,
    -- Background runs have slots of their own.
    in_background boolean NOT NULL DEFAULT false,
    -- An open job keeps its last iterations only: the number of rounds whose calls were removed, the event up to which
    -- its log was trimmed, and the position of the next trim. `trimmed_seq` is for ended runs.
    trimmed_rounds integer NOT NULL DEFAULT 0,
    trimmed_log_seq bigint NOT NULL DEFAULT 0,
    mark_round integer NOT NULL DEFAULT 0,
    mark_seq bigint NOT NULL DEFAULT 0,
    trimmed_failures integer NOT NULL DEFAULT 0,  -- removed calls of an open job that had failed
    -- The part of the token budget that top-ups added. Turns of the model do not inherit it.
    topped_up_tokens bigint NOT NULL DEFAULT 0,
    silent boolean NOT NULL DEFAULT false,  -- a job that sends no notices, not even at its end
    -- For a delegated run, the conversation that its jobs report to. For any run below another, the runs above that are
    -- not jobs, nearest first and comma-separated; the last is the root run.
    root_conversation_id text COLLATE "C" NOT NULL DEFAULT '',
    agents_above text COLLATE "C" NOT NULL DEFAULT '',
    series_grant bytea,
    program smallint NOT NULL DEFAULT 0,  -- 1 for a workflow, 2 for a goal
    -- The run whose token budget also counts this run's tokens (empty for none), and what its whole tree has used.
    budget_run_id text COLLATE "C" NOT NULL DEFAULT '',
    shared_tokens_used bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (run_id, store_id)
) WITH (fillfactor = 80);
-- Used slots.
CREATE INDEX runs_active ON runs (store_id, user_id, claim_at) WHERE active;
CREATE INDEX runs_attention ON runs (store_id, attention_time, run_id) WHERE attention IS NOT NULL;
CREATE INDEX runs_background ON runs (store_id, claim_at)
    WHERE in_background AND claim_at IS NOT NULL AND NOT active;
-- What a worker may claim, now or later. The loose scan over stores and the claim itself read only this.
CREATE INDEX runs_claimable ON runs (store_id, claim_at) WHERE claim_at IS NOT NULL;
-- Only the few runs that have crashed a worker.
CREATE INDEX runs_crashed ON runs (claim_at) WHERE claim_at IS NOT NULL AND crashes > 0;
-- The open jobs of a conversation.
CREATE INDEX runs_jobs ON runs (reports_to, store_id, create_time, run_id) WHERE reports_to <> '';
-- The jobs of a user among many other runs.
CREATE INDEX runs_jobs_of_user ON runs (store_id, user_id, create_time, run_id) WHERE reports_to <> '';
CREATE INDEX runs_labels ON runs USING gin (string_to_array(labels, E'\n')) WHERE labels <> '';
-- For lists of runs by agent.
CREATE INDEX runs_of_agent ON runs (store_id, user_id, agent_name, create_time, run_id)
    WHERE agent_name <> 'default';
CREATE INDEX runs_of_conversation ON runs (conversation_id, store_id, create_time, run_id);
CREATE INDEX runs_of_parent ON runs (parent_run_id, store_id, create_time, run_id) WHERE parent_run_id <> '';
CREATE INDEX runs_of_user ON runs (user_id, store_id, create_time, run_id);
-- For lists by state: few of a user's runs are open.
CREATE INDEX runs_of_user_in_state ON runs (user_id, store_id, state, create_time, run_id);
CREATE INDEX runs_of_worker ON runs (worker_id, store_id, run_id) WHERE worker_id IS NOT NULL;
-- For counts, and for the queue of a store.
CREATE INDEX runs_open ON runs (state, store_id) WHERE state < 10;
-- For the inbox: runs that wait for a top-up and nothing else (WAITING, WAIT_KIND_BUDGET).
CREATE INDEX runs_short_of_tokens ON runs (store_id, create_time, run_id) WHERE state = 3 AND waits = '\x04';
-- For the retention sweep.
CREATE INDEX runs_untrimmed ON runs (end_time) WHERE trimmed_seq = 0 AND end_time IS NOT NULL;
-- The runs of each user that wait for a slot; those in the background are in `runs_background`.
CREATE INDEX runs_waiting ON runs (store_id, user_id, claim_at)
    WHERE claim_at IS NOT NULL AND NOT active AND NOT in_background;

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
    offer_client_id text COLLATE "C",  -- null if never offered, empty if no client holds it
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
    -- Several approvers, escalated requests, and questions with a default answer.
    approvals_required smallint NOT NULL DEFAULT 1,
    approvals bytea,  -- null for none
    escalated boolean NOT NULL DEFAULT false,
    has_default boolean NOT NULL DEFAULT false,
    child_run_id text COLLATE "C" NOT NULL DEFAULT '',
    progress_time timestamptz,
    earlier_approvals bytea,  -- approvals given before the call was edited; null for none
    state_time timestamptz NOT NULL,
    -- The series that an approval can grant, and the grant of the job, packed; null for none.
    series bytea,
    asked_user_id text COLLATE "C",  -- who alone may decide: empty for approvers, null for the usual rules
    PRIMARY KEY (call_id, store_id)
);
CREATE INDEX calls_held ON calls (offer_client_id, store_id, run_id, call_id)
    WHERE state = 3 AND offer_client_id <> '';
CREATE INDEX calls_held_until ON calls (offer_expire_time) WHERE state = 3 AND offer_client_id <> '';
CREATE INDEX calls_of_run ON calls (run_id, store_id, round, batch_index, call_id);
CREATE INDEX calls_open ON calls (run_id, store_id) WHERE state < 10;
CREATE INDEX calls_pending ON calls (store_id, (coalesce(nullif(asked_user_id, ''), user_id)), create_time, call_id)
    WHERE state IN (2, 3, 4, 6) AND reserved_by = '';
-- The store's approval inbox.
CREATE INDEX calls_to_approve ON calls (store_id, create_time, call_id)
    WHERE state = 2 AND reserved_by = '' AND coalesce(asked_user_id, '') = '';

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
    credential_id text COLLATE "C" NOT NULL DEFAULT '',
    delegate_user_id text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, run_id, command_id)
);
CREATE INDEX commands_unread ON commands (store_id, run_id, number) WHERE NOT consumed;

-- A row has the events that one transaction wrote for a run, or several rows if they are large.
CREATE TABLE events (
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    last_seq bigint NOT NULL,
    first_seq bigint NOT NULL,
    events bytea NOT NULL,  -- a RunEvents message, so that all watchers get the same bytes
    PRIMARY KEY (store_id, run_id, last_seq)
);

CREATE TABLE requests (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    request_id text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    steered boolean NOT NULL,
    create_time timestamptz NOT NULL,
    -- The conversation that the request created, if it created no run.
    conversation_id text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, user_id, request_id)
);
CREATE INDEX requests_old ON requests (create_time);

-- Life-cycle events that JetStream has not acknowledged. The payload is read from `events`.
CREATE TABLE outbox (
    id bigint GENERATED ALWAYS AS IDENTITY,
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    "time" timestamptz NOT NULL,
    -- The bytes of a life-cycle event that belongs to no run's log, such as a schedule's; `seq` is 0.
    payload bytea,
    PRIMARY KEY (id, store_id)
);
-- Trimming a log checks that the run's end was sent.
CREATE INDEX outbox_of_run ON outbox (store_id, run_id);

-- Acknowledged events, kept for a while because JetStream may lose them.
CREATE TABLE sent (
    id bigint NOT NULL,
    store_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    type text COLLATE "C" NOT NULL,
    "time" timestamptz NOT NULL,
    sent_time timestamptz NOT NULL DEFAULT now(),
    stream_create_time timestamptz NOT NULL,  -- the stream that acknowledged it
    stream_seq bigint NOT NULL,
    payload bytea,
    PRIMARY KEY (id, store_id)
);
CREATE INDEX sent_old ON sent (sent_time);

-- One row: the latest time seen. A replica that starts later can tell that the clock went back.
CREATE TABLE clock (
    is_only boolean NOT NULL DEFAULT true,
    seen_time timestamptz NOT NULL,
    PRIMARY KEY (is_only),
    CHECK (is_only)
);
INSERT INTO clock (seen_time) VALUES (clock_timestamp());

-- Every transaction that changes API keys raises `last_change` and so locks this row: changes commit in order, and a
-- reader that asks for later changes misses none.
CREATE TABLE key_changes (
    is_only boolean NOT NULL DEFAULT true,
    last_change bigint NOT NULL,
    PRIMARY KEY (is_only),
    CHECK (is_only)
);
INSERT INTO key_changes (last_change) VALUES (0);

CREATE TABLE api_keys (
    key_id text NOT NULL,
    digest bytea NOT NULL,
    change bigint NOT NULL,
    name text NOT NULL,
    store_id text NOT NULL,  -- empty for keys of the deployment
    user_id text NOT NULL,
    roles text[] NOT NULL,
    decides_for_users boolean NOT NULL,
    expire_time timestamptz,
    create_time timestamptz NOT NULL,
    create_user_id text NOT NULL,
    create_credential_id text NOT NULL,
    revoke_time timestamptz,
    revoke_user_id text NOT NULL DEFAULT '',
    revoke_credential_id text NOT NULL DEFAULT '',
    last_use_time timestamptz,
    request_id text NOT NULL,  -- empty for none
    request_hash bytea NOT NULL,
    -- The users who may know the key's secret, because they created it or a key in the chain that led to it. Keys
    -- created by a deployment key or the local key (`local`) start with none.
    maker_user_ids text[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (key_id),
    UNIQUE (change),
    UNIQUE (digest)
);
CREATE UNIQUE INDEX api_keys_by_request ON api_keys (create_credential_id, create_user_id, request_id)
    WHERE request_id <> '';
CREATE INDEX api_keys_ended ON api_keys (LEAST(revoke_time, expire_time));
CREATE INDEX api_keys_of_store ON api_keys (store_id, key_id);

-- Events of API keys. Append-only: only the function below removes old rows, so that a role
-- with SELECT and INSERT cannot.
CREATE TABLE key_events (
    event_id bigint GENERATED ALWAYS AS IDENTITY,
    "time" timestamptz NOT NULL,
    kind text NOT NULL,
    store_id text NOT NULL,  -- empty for keys of the deployment
    key_id text NOT NULL,  -- this and the next columns: as the key was at the time
    key_name text NOT NULL,
    user_id text NOT NULL,
    roles text[] NOT NULL,
    by_store_id text NOT NULL,
    by_user_id text NOT NULL,
    by_delegate_user_id text NOT NULL,
    by_credential_id text NOT NULL,
    PRIMARY KEY (event_id)
);
CREATE INDEX key_events_by_time ON key_events ("time");
CREATE INDEX key_events_of_key ON key_events (key_id, event_id);
CREATE INDEX key_events_of_kind ON key_events (kind, event_id);
CREATE INDEX key_events_of_store ON key_events (store_id, event_id);

-- Removes at most `rows_max` events older than 90 days, and returns how many. Runs with the table owner's rights for
-- every caller.
CREATE FUNCTION remove_old_key_events(rows_max integer) RETURNS bigint
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH gone AS (
        DELETE FROM job_store.key_events WHERE event_id IN (
            SELECT event_id FROM job_store.key_events WHERE "time" < now() - interval '90 days'
            ORDER BY "time" LIMIT rows_max
        ) RETURNING event_id
    )
    SELECT count(*) FROM gone
$$;

-- What each layer of the settings sets, as JSON. `change` is the last row of settings_changes about it.
CREATE TABLE store_settings (
    store_id text COLLATE "C" NOT NULL,  -- empty for the layer DEPLOYMENT
    layer integer NOT NULL,
    settings bytea NOT NULL,
    change bigint NOT NULL,
    PRIMARY KEY (store_id, layer)
);
CREATE INDEX store_settings_by_change ON store_settings (change);

-- Changes of the settings. Append-only, and kept.
CREATE TABLE settings_changes (
    change bigint GENERATED ALWAYS AS IDENTITY,
    "time" timestamptz NOT NULL,
    layer integer NOT NULL,
    store_id text COLLATE "C" NOT NULL,
    before bytea NOT NULL,
    after bytea NOT NULL,
    user_id text NOT NULL,
    credential_id text NOT NULL,
    PRIMARY KEY (change)
);
CREATE INDEX settings_changes_of_store ON settings_changes (store_id, change);

-- The words of messages by message number; number 0 has those of the user's title. Each word is prefixed with its
-- owner's mark, so that a search never reads other users' words. A background task adds them; they are deleted with
-- their messages.
CREATE TABLE conversation_words (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    words tsvector NOT NULL,
    PRIMARY KEY (store_id, conversation_id, number),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);
CREATE INDEX conversation_words_search ON conversation_words USING gin (words);

-- The agents and workflows of a store. Deleted ones are kept, so that their version numbers continue if recreated.
CREATE TABLE definitions (
    store_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,  -- agent or workflow
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,  -- the newest
    uses text[] NOT NULL,  -- definitions of the same kind that the newest version uses
    delete_time timestamptz,
    delete_user_id text NOT NULL DEFAULT '',
    delete_credential_id text NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, kind, name)
);

-- Versions never change.
CREATE TABLE definition_versions (
    store_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    content bytea NOT NULL,
    create_time timestamptz NOT NULL,
    create_user_id text NOT NULL,
    create_credential_id text NOT NULL,
    PRIMARY KEY (store_id, kind, name, version)
);

-- The history of a fork, which is never copied: messages `first_number` to `last_number` are those of
-- `source_conversation_id`. The list is flat: each source owns its messages. Retention keeps messages that a row
-- names. An empty source was erased: the eraser locks the source and empties the rows that name it in one transaction;
-- adding a row locks the source too.
CREATE TABLE conversation_segments (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    first_number bigint NOT NULL,
    last_number bigint NOT NULL,
    source_conversation_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (store_id, conversation_id, first_number),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);
CREATE INDEX conversation_segments_of_source ON conversation_segments (store_id, source_conversation_id, last_number);

-- Agents that a user has saved for themselves. Only the newest version is kept.
CREATE TABLE agent_drafts (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    content bytea NOT NULL,
    create_time timestamptz NOT NULL,
    create_credential_id text NOT NULL,
    PRIMARY KEY (store_id, user_id, name)
);

-- The runs (without a call) and calls of an erased conversation, until all services have erased them; afterwards only
-- those with an effect outside.
CREATE TABLE erased_items (
    store_id text COLLATE "C" NOT NULL,
    conversation_id text COLLATE "C" NOT NULL,
    run_id text COLLATE "C" NOT NULL,
    call_id text COLLATE "C" NOT NULL,
    tool_name text COLLATE "C" NOT NULL,  -- empty unless `has_left`
    effect_class smallint NOT NULL,
    state smallint NOT NULL,
    start_time timestamptz,
    has_left boolean NOT NULL,
    PRIMARY KEY (store_id, conversation_id, run_id, call_id),
    FOREIGN KEY (store_id, conversation_id) REFERENCES conversations ON DELETE CASCADE
);

-- Usage figures per hour (UTC). Rows of a tool have figures of calls, rows of a model those of model calls, and rows
-- with neither those of runs. A figure is spread over slots, so that concurrent transactions rarely wait for each other.
-- The hours of old days are merged into one row, whose hour is -1.
CREATE TABLE usage_hours (
    store_id text COLLATE "C" NOT NULL,
    agent_name text COLLATE "C" NOT NULL,
    day date NOT NULL,
    hour smallint NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    tool_name text COLLATE "C" NOT NULL,
    model text COLLATE "C" NOT NULL,
    slot smallint NOT NULL,
    input_tokens bigint NOT NULL DEFAULT 0,
    cached_input_tokens bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    reasoning_tokens bigint NOT NULL DEFAULT 0,
    model_calls bigint NOT NULL DEFAULT 0,
    estimated_tokens bigint NOT NULL DEFAULT 0,
    runs bigint NOT NULL DEFAULT 0,  -- runs created
    runs_completed bigint NOT NULL DEFAULT 0,
    runs_failed bigint NOT NULL DEFAULT 0,
    runs_cancelled bigint NOT NULL DEFAULT 0,
    runs_expired bigint NOT NULL DEFAULT 0,
    rounds bigint NOT NULL DEFAULT 0,  -- of the runs that ended
    run_milliseconds bigint NOT NULL DEFAULT 0,  -- from creation to end
    calls_succeeded bigint NOT NULL DEFAULT 0,  -- or detached
    calls_failed bigint NOT NULL DEFAULT 0,  -- or with an unknown outcome
    calls_refused bigint NOT NULL DEFAULT 0,  -- rejected, cancelled or expired
    call_milliseconds bigint NOT NULL DEFAULT 0,  -- from start to end
    PRIMARY KEY (store_id, day, agent_name, hour, user_id, tool_name, model, slot)
) WITH (fillfactor = 50);
-- For merging the hours of old days, and for figures of all stores.
CREATE INDEX usage_hours_fine ON usage_hours (day) WHERE hour >= 0;
CREATE INDEX usage_hours_old ON usage_hours (day);

-- Tokens used per day (UTC) by a user or, if `user_id` is empty, by the whole store. Those of delegated runs count once.
CREATE TABLE token_days (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    day date NOT NULL,
    slot smallint NOT NULL,
    tokens bigint NOT NULL,
    PRIMARY KEY (store_id, user_id, day, slot)
) WITH (fillfactor = 50);
CREATE INDEX token_days_old ON token_days (day);

-- When a rate of model calls or events is unused again. Lost in a crash of the database, after which a minute's worth is free.
-- The store is empty for the rates of model servers.
CREATE UNLOGGED TABLE model_rates (
    store_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    unused_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, name)
) WITH (fillfactor = 50);

-- Model calls that count against limits per minute and token budgets. A call that has ended is kept for a while, so that
-- a repeated request does not count it again. Lost in a crash of the database.
CREATE UNLOGGED TABLE model_calls (
    store_id text COLLATE "C" NOT NULL,
    model_call_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    agent_name text COLLATE "C" NOT NULL,
    -- Tokens reserved in budgets; 0 for a call that has ended.
    tokens bigint NOT NULL,
    expire_time timestamptz NOT NULL,
    ended boolean NOT NULL,
    PRIMARY KEY (store_id, model_call_id)
);
CREATE INDEX model_calls_open ON model_calls (store_id) WHERE NOT ended;
CREATE INDEX model_calls_old ON model_calls (expire_time);

-- Model servers that agent-loop knows. The store is always empty.
CREATE UNLOGGED TABLE model_servers (
    store_id text COLLATE "C" NOT NULL,
    model_server text COLLATE "C" NOT NULL,
    report_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, model_server)
);

-- Model servers that are unavailable. The store is always empty.
CREATE UNLOGGED TABLE model_outages (
    store_id text COLLATE "C" NOT NULL,
    model_server text COLLATE "C" NOT NULL,
    outages integer NOT NULL,
    closed_until timestamptz NOT NULL,
    PRIMARY KEY (store_id, model_server)
);

-- Which set of files owns a resource. `user_id` is empty for resources of the store.
CREATE TABLE declarations (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    set_name text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    update_user_id text NOT NULL,
    update_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, user_id, kind, name)
);

-- Which process applies a set, and until when.
CREATE TABLE set_leases (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    set_name text COLLATE "C" NOT NULL,
    holder_id text NOT NULL,
    expire_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, user_id, set_name)
);

-- Schedules. The definition and the last fires are packed. `claim_at` is when a worker may claim the schedule: its due
-- time, or a little later while a worker fires it; null if paused or ended.
CREATE TABLE schedules (
    store_id text COLLATE "C" NOT NULL,
    schedule_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    definition bytea NOT NULL,
    user_roles text NOT NULL,  -- comma-separated
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    people text NOT NULL,  -- comma-separated
    create_time timestamptz NOT NULL,
    due_time timestamptz,
    claim_at timestamptz,
    waiting_time timestamptz,  -- due time of the fire that waits for the previous run
    pause_time timestamptz,
    pause_note text NOT NULL,
    self_paused boolean NOT NULL,
    failures integer NOT NULL,
    last_run_id text NOT NULL,  -- empty for none
    last_run_counted boolean NOT NULL,
    fires bytea NOT NULL,
    -- The `pause_time` whose notification was sent, for schedules that paused automatically.
    told_time timestamptz,
    PRIMARY KEY (store_id, schedule_id),
    UNIQUE (store_id, user_id, name)
);
CREATE INDEX schedules_claimable ON schedules (claim_at) WHERE claim_at IS NOT NULL;
CREATE INDEX schedules_untold ON schedules (pause_time)
    WHERE self_paused AND told_time IS DISTINCT FROM pause_time;

-- Triggers. The definition and the last fires are packed. Signatures are checked with the secret itself, so it is not
-- a digest.
CREATE TABLE triggers (
    store_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    definition bytea NOT NULL,
    user_roles text NOT NULL,  -- comma-separated
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    people text NOT NULL,  -- comma-separated
    create_time timestamptz NOT NULL,
    pause_time timestamptz,
    pause_note text NOT NULL,
    self_paused boolean NOT NULL,
    failures integer NOT NULL,
    last_run_id text NOT NULL,  -- empty for none
    last_run_counted boolean NOT NULL,
    fires bytea NOT NULL,
    secret bytea NOT NULL,
    former_secrets bytea NOT NULL,  -- packed, with the time until which each is valid
    -- Mailboxes: the process that reads it and the end of its lease (null for webhooks and while paused), the last mail
    -- that was delivered, and since when and why the mailbox is unreachable, with the last report of that.
    reader_id text NOT NULL DEFAULT '',
    claim_at timestamptz,
    uid_validity bigint NOT NULL DEFAULT 0,
    last_uid bigint NOT NULL DEFAULT 0,
    unreachable_time timestamptz,
    unreachable_report_time timestamptz,
    unreachable_reason text NOT NULL DEFAULT '',
    told_time timestamptz,
    -- Refused webhooks (bad or old signature): their number and the last one. Written once a minute at most.
    refused_count bigint NOT NULL DEFAULT 0,
    refused_time timestamptz,
    refused_reason text NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, trigger_id),
    UNIQUE (store_id, user_id, name)
);
CREATE INDEX triggers_claimable ON triggers (claim_at) WHERE claim_at IS NOT NULL;
CREATE INDEX triggers_untold ON triggers (pause_time)
    WHERE self_paused AND told_time IS DISTINCT FROM pause_time;

-- Recent events. Each fires once.
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

-- Serialised events: at most one per lane waits to be fired, from `claim_at` on.
CREATE TABLE trigger_lanes (
    store_id text COLLATE "C" NOT NULL,
    trigger_id text COLLATE "C" NOT NULL,
    lane text COLLATE "C" NOT NULL,
    last_run_id text NOT NULL,
    event_id text NOT NULL,  -- this and the next columns: the waiting event; empty for none
    data bytea NOT NULL,
    conversation_key text NOT NULL,
    awaits_run boolean NOT NULL,  -- waits for the end of `last_run_id` rather than for a time
    first_time timestamptz,
    claim_at timestamptz,
    update_time timestamptz NOT NULL,
    PRIMARY KEY (store_id, trigger_id, lane),
    FOREIGN KEY (store_id, trigger_id) REFERENCES triggers ON DELETE CASCADE
);
CREATE INDEX trigger_lanes_claimable ON trigger_lanes (claim_at) WHERE claim_at IS NOT NULL;
CREATE INDEX trigger_lanes_old ON trigger_lanes (update_time);
