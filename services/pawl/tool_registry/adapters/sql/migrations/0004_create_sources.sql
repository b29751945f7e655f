-- What stores have connected to get tools from. Their tools are in `tools`, with `<kind>:<name>` as their source.
CREATE TABLE tool_sources (
    store_id     text NOT NULL,
    name         text NOT NULL,
    kind         text NOT NULL,
    -- JSON; holds names of secrets, never their values.
    config       bytea NOT NULL,
    runs_program boolean NOT NULL,
    -- As of the last check.
    state        text NOT NULL,
    problem      text NOT NULL DEFAULT '',
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, name)
);
