-- Agents that a user has made for nobody else. Of each only the newest version is kept.
CREATE TABLE agent_drafts (
    store_id text COLLATE "C" NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    definition bytea NOT NULL,
    tool_names text[] NOT NULL,
    create_time timestamptz NOT NULL,
    create_credential_id text NOT NULL,
    PRIMARY KEY (store_id, user_id, name)
);
