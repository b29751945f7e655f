-- The user from whom the keys come with which a key was made: in whose hands it may be. Empty where the first of them was
-- made by the deployment, or by the local key (`local`).
ALTER TABLE api_keys ADD COLUMN root_user_id text NOT NULL DEFAULT '';
WITH RECURSIVE rooted AS (
    SELECT key_id, user_id, roles,
        CASE WHEN create_credential_id IN ('', 'local') THEN '' ELSE create_user_id END AS root_user_id
    FROM api_keys AS made
    WHERE NOT EXISTS (SELECT FROM api_keys AS maker WHERE maker.key_id = made.create_credential_id)
    UNION ALL
    SELECT made.key_id, made.user_id, made.roles,
        CASE WHEN maker.roles @> '{deployment}' THEN ''
            WHEN maker.root_user_id <> '' THEN maker.root_user_id ELSE maker.user_id END
    FROM api_keys AS made JOIN rooted AS maker ON maker.key_id = made.create_credential_id
)
UPDATE api_keys SET root_user_id = rooted.root_user_id FROM rooted WHERE api_keys.key_id = rooted.key_id;
-- Other users, with commas between, whose act the start of a run was, too, where several people are needed.
ALTER TABLE runs ADD COLUMN people text COLLATE "C" NOT NULL DEFAULT '';
