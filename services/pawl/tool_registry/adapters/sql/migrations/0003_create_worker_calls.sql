-- Programs that run tools of a store. A row is there while the worker is attached, and for its lease after that.
CREATE TABLE workers (
    store_id    text NOT NULL,
    group_name  text NOT NULL,
    worker_id   text NOT NULL,
    -- The process of the registry that has its stream, and which of its streams that is.
    instance_id text NOT NULL,
    attachment  text NOT NULL,
    expires_at  timestamptz NOT NULL,
    -- Names and hashes of the definitions that it has, one beside the other.
    tool_names  text[] NOT NULL,
    tool_hashes text[] NOT NULL,
    PRIMARY KEY (store_id, group_name, worker_id)
);

CREATE UNIQUE INDEX workers_attachment ON workers (attachment);

-- Calls for workers, from the time that an execution asks until some time after its deadline.
CREATE TABLE worker_calls (
    store_id         text NOT NULL,
    call_id          text NOT NULL,
    group_name       text NOT NULL,
    tool_name        text NOT NULL,
    definition_hash  text NOT NULL,
    purpose          text NOT NULL,
    -- What the worker is told of the call, and its arguments; empty when the call is over.
    details          bytea NOT NULL,
    attempt          integer NOT NULL,
    deadline         timestamptz NOT NULL,
    -- The execution that asked, and the process that it runs in.
    token            text NOT NULL,
    asker_id         text NOT NULL,
    state            text NOT NULL CHECK (state IN ('WAITING', 'HELD', 'DONE')),
    -- Grows with every hand-out, also over executions.
    lease_epoch      bigint NOT NULL,
    worker_id        text NOT NULL,
    -- The worker came back as a process that does not know of the call.
    is_lost          boolean NOT NULL DEFAULT false,
    cancel_requested boolean NOT NULL DEFAULT false,
    progress         bytea,
    -- The worker's answer; null once the execution has it.
    answer           bytea,
    is_accepted      boolean NOT NULL DEFAULT false,
    PRIMARY KEY (store_id, call_id)
);

CREATE INDEX worker_calls_waiting ON worker_calls (store_id, group_name) WHERE state = 'WAITING';
CREATE INDEX worker_calls_held ON worker_calls (store_id, group_name, worker_id) WHERE state = 'HELD';
CREATE INDEX worker_calls_news ON worker_calls (asker_id) WHERE state = 'HELD' OR answer IS NOT NULL;
CREATE INDEX worker_calls_deadline ON worker_calls (deadline);
