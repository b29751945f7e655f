-- How far calls have come: the newest checkpoint of each, for the execution that begins it again.
CREATE TABLE checkpoints (
    store_id   text NOT NULL,
    call_id    text NOT NULL,
    -- The attempt that may write: the newest one.
    token      text NOT NULL,
    attempt    integer NOT NULL,
    -- JSON; null where an attempt was begun again and none was written.
    content    bytea,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, call_id)
);

CREATE INDEX checkpoints_old ON checkpoints (written_at);
