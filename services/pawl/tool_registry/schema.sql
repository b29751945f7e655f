-- Every key starts with the store. Built-in tools have an empty store_id and are shared by all stores. A version of a
-- definition never changes.
CREATE TABLE tool_versions (
    store_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    definition bytea NOT NULL,
    definition_hash text NOT NULL,
    source text NOT NULL,
    binding bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    -- Who registered the tool; empty for tools of sources.
    user_id text NOT NULL,
    PRIMARY KEY (store_id, name, version),
    CHECK (version > 0)
);
CREATE INDEX tool_versions_hash ON tool_versions (store_id, name, definition_hash);

-- The tools that are registered now. An unregistered name keeps its versions.
CREATE TABLE tools (
    store_id text NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    PRIMARY KEY (store_id, name),
    FOREIGN KEY (store_id, name, version) REFERENCES tool_versions
);

-- Live processes of the registry. One heartbeat row for all executions of a process.
CREATE TABLE instances (
    instance_id text NOT NULL,
    expires_at timestamptz NOT NULL,
    PRIMARY KEY (instance_id)
);

-- The journal: written before the effect, completed after it. `fingerprint` is the digest of tool and arguments, empty
-- if the call was cancelled before it started. `token` is that of the last attempt. `inverse` undoes the effect; null
-- for none.
CREATE TABLE executions (
    store_id text NOT NULL,
    call_id text NOT NULL,
    run_id text NOT NULL,
    tool_name text NOT NULL,
    tool_version integer NOT NULL,
    effect text NOT NULL,
    fingerprint text NOT NULL,
    instance_id text NOT NULL,
    token text NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT now(),
    cancel_requested boolean NOT NULL DEFAULT false,
    unknowns integer NOT NULL DEFAULT 0,
    ended_at timestamptz,
    outcome text,
    content bytea,
    is_error boolean,
    error_reason text,
    note text,
    inverse bytea,
    duration_seconds double precision,
    question bytea,
    -- The question that the running tool asks, how many came before it, and the answers.
    question_position integer NOT NULL DEFAULT 0,
    answers bytea,
    -- Calls that are completed from outside: the tool has returned and the call has not ended. SHA-256 of the token.
    completion_digest bytea,
    completion_terms bytea,
    awaits_until timestamptz,
    completion bytea,
    completed_by text[],
    untold_at timestamptz,
    PRIMARY KEY (call_id, store_id),
    CHECK ((outcome IS NULL) = (ended_at IS NULL))
);
CREATE INDEX executions_awaited ON executions (awaits_until)
    WHERE awaits_until IS NOT NULL AND ended_at IS NULL;
CREATE INDEX executions_ended ON executions (ended_at) WHERE ended_at IS NOT NULL;
-- For erasing the executions of jobs, whose old calls the ledger no longer has.
CREATE INDEX executions_of_run ON executions (run_id, store_id);
CREATE UNIQUE INDEX executions_of_token ON executions (store_id, completion_digest)
    WHERE completion_digest IS NOT NULL;
CREATE INDEX executions_open ON executions (instance_id) WHERE ended_at IS NULL;
CREATE INDEX executions_untold ON executions (untold_at) WHERE untold_at IS NOT NULL;

-- Resources in use by running executions. The lock of a dead process is free.
CREATE TABLE resource_locks (
    store_id text NOT NULL,
    resource_key text NOT NULL,
    holder text NOT NULL,
    instance_id text NOT NULL,
    PRIMARY KEY (store_id, resource_key)
);

-- Data of the planning tools.
CREATE TABLE projects (
    store_id text NOT NULL,
    user_id text NOT NULL,
    project_id text NOT NULL,
    title text NOT NULL,
    status text NOT NULL DEFAULT 'active',
    notes text,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, project_id)
);
CREATE UNIQUE INDEX projects_title ON projects (store_id, user_id, lower(title));

CREATE TABLE tasks (
    store_id text NOT NULL,
    user_id text NOT NULL,
    task_id text NOT NULL,
    project_id text NOT NULL,
    parent_task_id text,
    title text NOT NULL,
    notes text,
    due date,
    is_done boolean NOT NULL DEFAULT false,
    idempotency_key text NOT NULL,
    position bigint GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL DEFAULT now(),
    run_id text NOT NULL,  -- the run that created the task
    PRIMARY KEY (store_id, user_id, task_id),
    UNIQUE (store_id, user_id, idempotency_key),
    FOREIGN KEY (store_id, user_id, parent_task_id) REFERENCES tasks,
    FOREIGN KEY (store_id, user_id, project_id) REFERENCES projects
);
CREATE INDEX tasks_order ON tasks (store_id, user_id, "position");
CREATE INDEX tasks_parent ON tasks (store_id, user_id, parent_task_id);

-- A comment is on either a task or a project.
CREATE TABLE comments (
    store_id text NOT NULL,
    user_id text NOT NULL,
    comment_id text NOT NULL,
    task_id text,
    project_id text,
    content text NOT NULL,
    idempotency_key text NOT NULL,
    position bigint GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, comment_id),
    UNIQUE (store_id, user_id, idempotency_key),
    FOREIGN KEY (store_id, user_id, task_id) REFERENCES tasks ON DELETE CASCADE,
    FOREIGN KEY (store_id, user_id, project_id) REFERENCES projects,
    CHECK (num_nonnulls(task_id, project_id) = 1)
);
CREATE INDEX comments_order ON comments (store_id, user_id, "position");
CREATE INDEX comments_task ON comments (store_id, user_id, task_id);

-- Changes by calls: a repeated call changes nothing and returns the same result.
CREATE TABLE plan_changes (
    store_id text NOT NULL,
    user_id text NOT NULL,
    idempotency_key text NOT NULL,
    change bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (idempotency_key, store_id, user_id)
);
CREATE INDEX plan_changes_age ON plan_changes (store_id, user_id, created_at);

-- Decisions of people that hold for later calls. `request_id` is for idempotency, empty for none.
CREATE TABLE rules (
    store_id text NOT NULL,
    rule_id text NOT NULL,
    request_id text NOT NULL,
    request_hash bytea NOT NULL,
    effect text NOT NULL,
    scope text NOT NULL,
    scope_id text NOT NULL,
    user_id text NOT NULL,
    tool_name text NOT NULL,
    arguments bytea NOT NULL,
    items_max bigint NOT NULL,
    includes_destructive boolean NOT NULL,
    uses_max bigint NOT NULL,
    uses bigint NOT NULL DEFAULT 0,
    tool_version integer NOT NULL,
    reason text NOT NULL,
    name text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz,
    revoked_at timestamptz,
    revoked_by text NOT NULL DEFAULT '',
    from_call_id text NOT NULL,  -- the call whose approval made the rule; empty for none
    PRIMARY KEY (store_id, rule_id)
);
CREATE INDEX rules_in_force ON rules (store_id) WHERE revoked_at IS NULL;
CREATE UNIQUE INDEX rules_request ON rules (store_id, user_id, request_id) WHERE request_id <> '';

-- Calls that a rule allowed. Each counts once.
CREATE TABLE rule_uses (
    store_id text NOT NULL,
    rule_id text NOT NULL,
    call_id text NOT NULL,
    used_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (store_id, rule_id, call_id),
    FOREIGN KEY (store_id, rule_id) REFERENCES rules
);
CREATE INDEX rule_uses_time ON rule_uses (used_at);

-- Programs that run tools of a store. A row exists while the worker is attached, and for its lease afterwards.
CREATE TABLE workers (
    store_id text NOT NULL,
    group_name text NOT NULL,
    worker_id text NOT NULL,
    -- The registry process that has the worker's stream, and the stream.
    instance_id text NOT NULL,
    attachment text NOT NULL,
    expires_at timestamptz NOT NULL,
    tool_names text[] NOT NULL,
    -- Hashes of the definitions, in the order of `tool_names`.
    tool_hashes text[] NOT NULL,
    PRIMARY KEY (store_id, group_name, worker_id)
);
CREATE UNIQUE INDEX workers_attachment ON workers (attachment, store_id);

-- Calls for workers, from the request until some time after the deadline. `details` are empty once the call is over.
-- `token` and `asker_id` name the execution and its process. `lease_epoch` grows with each hand-out, also over
-- executions. `is_lost`: the worker returned as a process that does not know the call.
CREATE TABLE worker_calls (
    store_id text NOT NULL,
    call_id text NOT NULL,
    group_name text NOT NULL,
    tool_name text NOT NULL,
    definition_hash text NOT NULL,
    purpose text NOT NULL,
    details bytea NOT NULL,
    attempt integer NOT NULL,
    deadline timestamptz NOT NULL,
    token text NOT NULL,
    asker_id text NOT NULL,
    state text NOT NULL,
    lease_epoch bigint NOT NULL,
    worker_id text NOT NULL,
    is_lost boolean NOT NULL DEFAULT false,
    cancel_requested boolean NOT NULL DEFAULT false,
    progress bytea,
    answer bytea,
    is_accepted boolean NOT NULL DEFAULT false,
    -- The audit entry's fields (null if the worker is only asked about the call), and the hand-outs whose late result
    -- needs no entry.
    origin bytea,
    told_epochs bigint[] NOT NULL,
    run_id text NOT NULL,
    PRIMARY KEY (call_id, store_id),
    CHECK (state IN ('WAITING', 'HELD', 'DONE'))
);
CREATE INDEX worker_calls_deadline ON worker_calls (deadline);
CREATE INDEX worker_calls_held ON worker_calls (worker_id, group_name, store_id, call_id) WHERE state = 'HELD';
CREATE INDEX worker_calls_news ON worker_calls (asker_id) WHERE state = 'HELD' OR answer IS NOT NULL;
-- For erasing calls of runs that the ledger no longer has.
CREATE INDEX worker_calls_run ON worker_calls (run_id, store_id);
CREATE INDEX worker_calls_waiting ON worker_calls (group_name, store_id) WHERE state = 'WAITING';

-- Tool sources of a store. Their tools are in `tools` with the source `<kind>:<name>`. `config` is a
-- SourceConfig with names of secrets, never values.
CREATE TABLE tool_sources (
    store_id text NOT NULL,
    name text NOT NULL,
    config bytea NOT NULL,
    state text NOT NULL,
    problem text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, name)
);

-- When a rate limit is unused again. Lost in a crash of the database, after which a minute's worth is free.
CREATE UNLOGGED TABLE rates (
    store_id text NOT NULL,
    name text NOT NULL,
    unused_at timestamptz NOT NULL,
    PRIMARY KEY (store_id, name)
) WITH (fillfactor = 50);

-- The audit chain of each store. Append-only.
CREATE TABLE audit (
    store_id text NOT NULL,
    seq bigint NOT NULL,
    kind text NOT NULL,
    recorded_at timestamptz NOT NULL,
    user_id text NOT NULL,
    run_id text NOT NULL,
    call_id text NOT NULL,
    tool_name text NOT NULL,
    tool_version integer NOT NULL,
    verdict text NOT NULL,
    reason text NOT NULL,
    by_user_id text NOT NULL,
    arguments_sha256 text NOT NULL,
    result_sha256 text NOT NULL,
    result_bytes bigint NOT NULL,
    duration_us bigint NOT NULL,
    prev_hash text NOT NULL,
    hash text NOT NULL,
    -- The credential that started the run, that of the person who decided, and the users of delegates that acted for
    -- either.
    credential_id text NOT NULL,
    delegate_user_id text NOT NULL,
    by_credential_id text NOT NULL,
    by_delegate_user_id text NOT NULL,
    -- The agent of the run; empty for rules and for late results of workers.
    agent_name text NOT NULL,
    PRIMARY KEY (store_id, seq)
);
-- A decision is recorded once, however often it is reported.
CREATE UNIQUE INDEX audit_decisions ON audit (store_id, call_id, verdict, by_user_id, arguments_sha256)
    WHERE kind = 'DECIDED';
-- A front end's result is recorded once, however often it is reported.
CREATE UNIQUE INDEX audit_results ON audit (store_id, call_id, verdict, by_user_id, arguments_sha256)
    WHERE kind = 'RETURNED' AND by_user_id <> '';
CREATE INDEX audit_runs ON audit (store_id, run_id, seq);
CREATE INDEX audit_times ON audit (store_id, recorded_at);

-- The last entry of each chain.
CREATE TABLE audit_heads (
    store_id text NOT NULL,
    seq bigint NOT NULL,
    hash text NOT NULL,
    PRIMARY KEY (store_id)
) WITH (fillfactor = 50);

-- Documents that models read and search. An empty owner means the whole store. `language` is the name of a text search
-- configuration; its oid differs between databases.
CREATE TABLE documents (
    store_id text NOT NULL,
    owner_id text NOT NULL,
    name text COLLATE "C" NOT NULL,
    language text NOT NULL,
    text_bytes integer NOT NULL,
    text_sha256 text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, owner_id, name)
);

-- Their texts in parts: one search vector is too small for the largest text, and a part gives the position of a hit.
CREATE TABLE document_parts (
    store_id text NOT NULL,
    owner_id text NOT NULL,
    name text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    byte_offset integer NOT NULL,
    content text NOT NULL,
    language text NOT NULL,
    search tsvector NOT NULL,
    PRIMARY KEY (store_id, owner_id, name, number),
    FOREIGN KEY (store_id, owner_id, name) REFERENCES documents ON DELETE CASCADE
);
CREATE INDEX document_parts_search ON document_parts USING gin (search);

-- The user whose worker attached first owns the group until its tools are unregistered.
CREATE TABLE worker_groups (
    store_id text NOT NULL,
    group_name text NOT NULL,
    user_id text NOT NULL,
    PRIMARY KEY (store_id, group_name)
);

-- What agents remember about users. Few and short, so searches read them all.
CREATE TABLE memories (
    store_id text NOT NULL,
    user_id text NOT NULL,
    agent_name text COLLATE "C" NOT NULL,
    memory_id text COLLATE "C" NOT NULL,
    content text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, agent_name, memory_id)
);

-- Secrets for the audit's digests, one per conversation and rule. Null once erased: the digests then reveal nothing.
CREATE TABLE audit_keys (
    store_id text NOT NULL,
    key_id text NOT NULL,
    secret bytea,
    PRIMARY KEY (store_id, key_id)
);

-- Runs of erased conversations, for a week. No call of them starts.
CREATE TABLE erased_runs (
    store_id text NOT NULL,
    run_id text NOT NULL,
    erase_time timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, run_id)
);
CREATE INDEX erased_runs_old ON erased_runs (erase_time);

-- The newest checkpoint of each call, for the execution that starts it again. `attempt` is the newest one, which alone
-- may write. `content` is JSON; null if an attempt started again and none was written.
CREATE TABLE checkpoints (
    store_id text NOT NULL,
    call_id text NOT NULL,
    token text NOT NULL,
    attempt integer NOT NULL,
    content bytea,
    written_at timestamptz NOT NULL DEFAULT now(),
    -- For erasing checkpoints of a job's old iterations, which the ledger no longer has.
    run_id text NOT NULL,
    PRIMARY KEY (store_id, call_id)
);
CREATE INDEX checkpoints_old ON checkpoints (written_at);
CREATE INDEX checkpoints_run ON checkpoints (store_id, run_id);

-- Calls that started under a series grant. Each counts once and has its own number.
CREATE TABLE grant_uses (
    store_id text NOT NULL,
    call_id text NOT NULL,
    digest text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    used_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (store_id, call_id, digest),
    UNIQUE (store_id, digest, number)
);
CREATE INDEX grant_uses_time ON grant_uses (used_at);
