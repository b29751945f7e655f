-- Who registered a tool of the store; empty for those of sources, and for what was registered before this was written down.
ALTER TABLE tool_versions ADD COLUMN user_id text NOT NULL DEFAULT '';

-- The user whose worker attached first has the group, until its tools are unregistered.
CREATE TABLE worker_groups (
    store_id   text NOT NULL,
    group_name text NOT NULL,
    user_id    text NOT NULL,
    PRIMARY KEY (store_id, group_name)
);
