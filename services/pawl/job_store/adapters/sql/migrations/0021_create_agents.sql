-- The agents of a store, also the deleted ones: their numbers go on if they are made again.
CREATE TABLE agents (
    store_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,                   -- the newest
    delegates_to text[] NOT NULL,               -- those of the newest
    delete_time timestamptz,
    delete_user_id text NOT NULL DEFAULT '',
    delete_credential_id text NOT NULL DEFAULT '',
    PRIMARY KEY (store_id, name)
);

-- Their versions never change.
CREATE TABLE agent_versions (
    store_id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    version integer NOT NULL,
    definition bytea NOT NULL,
    tool_names text[] NOT NULL,
    create_time timestamptz NOT NULL,
    create_user_id text NOT NULL,
    create_credential_id text NOT NULL,
    PRIMARY KEY (store_id, name, version)
);
