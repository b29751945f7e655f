-- The users who made a key, and the keys with which it was made: in whose hands it may be. What a key of the deployment or the
-- local key (`local`) makes begins anew, without any. It is a change, which services hear that have the keys already.
ALTER TABLE api_keys ADD COLUMN maker_user_ids text[] NOT NULL DEFAULT '{}';
WITH RECURSIVE known AS (
    SELECT key_id, user_id, roles,
        CASE WHEN create_credential_id IN ('', 'local') THEN '{}' ELSE ARRAY[create_user_id] END AS makers
    FROM api_keys AS made
    WHERE NOT EXISTS (SELECT FROM api_keys AS maker WHERE maker.key_id = made.create_credential_id)
    UNION ALL
    SELECT made.key_id, made.user_id, made.roles,
        CASE WHEN maker.roles @> '{deployment}' THEN '{}'
            ELSE maker.makers || ARRAY[maker.user_id, made.create_user_id] END
    FROM api_keys AS made JOIN known AS maker ON maker.key_id = made.create_credential_id
), changed AS (
    SELECT key_id, makers, row_number() OVER (ORDER BY key_id) - 1 AS before_last FROM known WHERE makers <> '{}'
), told AS (
    UPDATE key_changes SET last_change = last_change + (SELECT count(*) FROM changed) RETURNING last_change
)
UPDATE api_keys
SET maker_user_ids = ARRAY(SELECT DISTINCT unnest(changed.makers)), change = told.last_change - changed.before_last
FROM changed, told WHERE api_keys.key_id = changed.key_id;
-- Other users, with commas between, whose act the start of a run was, too, where several people are needed.
ALTER TABLE runs ADD COLUMN people text COLLATE "C" NOT NULL DEFAULT '';
