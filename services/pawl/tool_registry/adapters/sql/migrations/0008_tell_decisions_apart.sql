-- A decision is written once, whoever reports it and how often; who approves a call again after it was edited decides again.
DROP INDEX audit_decisions;
CREATE UNIQUE INDEX audit_decisions ON audit (store_id, call_id, verdict, by_user_id, arguments_sha256)
    WHERE kind = 'DECIDED';
