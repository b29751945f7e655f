-- Every key starts with store_id. Tools that the deployment loads are the same in every store: their store_id is empty,
-- which no store's can be.

-- A definition, once it has a version, never changes.
CREATE TABLE tool_versions (
    store_id        text NOT NULL,
    name            text NOT NULL,
    version         integer NOT NULL CHECK (version > 0),
    definition      bytea NOT NULL,
    definition_hash text NOT NULL,
    source          text NOT NULL,
    -- How the source runs it; opaque.
    binding         bytea NOT NULL DEFAULT '',
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, name, version)
);

CREATE INDEX tool_versions_hash ON tool_versions (store_id, name, definition_hash);

-- What is registered now, in stores. A name that is not here keeps its versions.
CREATE TABLE tools (
    store_id text NOT NULL,
    name     text NOT NULL,
    version  integer NOT NULL,
    PRIMARY KEY (store_id, name),
    FOREIGN KEY (store_id, name, version) REFERENCES tool_versions
);

-- Processes of the registry that live. One row, and one update, for all executions of a process.
CREATE TABLE instances (
    instance_id text PRIMARY KEY,
    expires_at  timestamptz NOT NULL
);

-- The journal. Written before the effect and completed after it.
CREATE TABLE executions (
    store_id         text NOT NULL,
    call_id          text NOT NULL,
    run_id           text NOT NULL,
    tool_name        text NOT NULL,
    tool_version     integer NOT NULL,
    effect           text NOT NULL,
    -- Digest of tool and arguments; empty if the call was cancelled before it began.
    fingerprint      text NOT NULL,
    instance_id      text NOT NULL,
    -- Of the attempt that wrote it last.
    token            text NOT NULL,
    begun_at         timestamptz NOT NULL DEFAULT now(),
    cancel_requested boolean NOT NULL DEFAULT false,
    unknowns         integer NOT NULL DEFAULT 0,
    ended_at         timestamptz,
    outcome          text CHECK ((outcome IS NULL) = (ended_at IS NULL)),
    content          bytea,
    is_error         boolean,
    error_reason     text,
    note             text,
    -- What takes the effect back; null if nothing does.
    inverse          bytea,
    duration_seconds double precision,
    -- What the running tool asks a person, after so many other questions, and the answers that were left for it.
    question          bytea,
    question_position integer NOT NULL DEFAULT 0,
    answers           bytea,
    PRIMARY KEY (store_id, call_id)
);

CREATE INDEX executions_open ON executions (instance_id) WHERE ended_at IS NULL;
CREATE INDEX executions_ended ON executions (ended_at) WHERE ended_at IS NOT NULL;

-- What running executions touch. A lock whose process does not live is free.
CREATE TABLE resource_locks (
    store_id     text NOT NULL,
    resource_key text NOT NULL,
    holder       text NOT NULL,
    instance_id  text NOT NULL,
    PRIMARY KEY (store_id, resource_key)
);

-- Data of the planning tools.
CREATE TABLE projects (
    store_id   text NOT NULL,
    user_id    text NOT NULL,
    project_id text NOT NULL,
    title      text NOT NULL,
    status     text NOT NULL DEFAULT 'active',
    notes      text,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, project_id)
);

CREATE UNIQUE INDEX projects_title ON projects (store_id, user_id, lower(title));

CREATE TABLE tasks (
    store_id        text NOT NULL,
    user_id         text NOT NULL,
    task_id         text NOT NULL,
    project_id      text NOT NULL,
    parent_task_id  text,
    title           text NOT NULL,
    notes           text,
    due             date,
    is_done         boolean NOT NULL DEFAULT false,
    idempotency_key text NOT NULL,
    position        bigint GENERATED ALWAYS AS IDENTITY,
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, task_id),
    UNIQUE (store_id, user_id, idempotency_key),
    FOREIGN KEY (store_id, user_id, project_id) REFERENCES projects,
    FOREIGN KEY (store_id, user_id, parent_task_id) REFERENCES tasks
);

CREATE INDEX tasks_order ON tasks (store_id, user_id, position);
CREATE INDEX tasks_parent ON tasks (store_id, user_id, parent_task_id);

-- What calls have changed of them: a call made again changes nothing, and says the same.
CREATE TABLE plan_changes (
    store_id        text NOT NULL,
    user_id         text NOT NULL,
    idempotency_key text NOT NULL,
    change          bytea NOT NULL,
    created_at      timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, idempotency_key)
);

CREATE INDEX plan_changes_age ON plan_changes (store_id, user_id, created_at);
