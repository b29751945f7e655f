-- What a front end returned is written once, whoever reports it and how often.
CREATE UNIQUE INDEX audit_results ON audit (store_id, call_id, verdict, by_user_id, arguments_sha256)
    WHERE kind = 'RETURNED' AND by_user_id <> '';
