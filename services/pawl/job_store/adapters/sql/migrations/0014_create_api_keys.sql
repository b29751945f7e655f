-- API keys; of their secrets only the digests. `change` is that of `key_changes`, which is raised and so locked in each
-- transaction that changes keys: changes are committed in their order, and who reads those after one misses none.
CREATE TABLE key_changes (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    last_change bigint NOT NULL
);
INSERT INTO key_changes (last_change) VALUES (0);

CREATE TABLE api_keys (
    key_id text PRIMARY KEY,
    digest bytea NOT NULL UNIQUE,
    change bigint NOT NULL UNIQUE,
    name text NOT NULL,
    store_id text NOT NULL,                     -- empty for those of the deployment
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
    request_id text NOT NULL,                   -- empty for none
    request_hash bytea NOT NULL
);
CREATE INDEX api_keys_of_store ON api_keys (store_id, key_id);
CREATE INDEX api_keys_ended ON api_keys (least(revoke_time, expire_time));
CREATE UNIQUE INDEX api_keys_by_request ON api_keys (create_credential_id, create_user_id, request_id)
    WHERE request_id <> '';
