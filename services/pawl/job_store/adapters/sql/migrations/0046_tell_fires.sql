-- Life-cycle events that stand in the log of no run, as that a schedule has fired: with seq 0 and their bytes.
ALTER TABLE outbox ADD COLUMN payload bytea;
ALTER TABLE sent ADD COLUMN payload bytea;
