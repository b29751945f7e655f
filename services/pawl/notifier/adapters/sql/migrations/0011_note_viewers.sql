-- When users who have a channel were last seen to watch a run: what they saw need not be told later.
CREATE TABLE viewers (
    store_id  text        NOT NULL,
    user_id   text        NOT NULL,
    run_id    text        NOT NULL,
    seen_time timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, run_id)
);
CREATE INDEX viewers_time ON viewers (seen_time);
CREATE INDEX viewers_by_run ON viewers (store_id, run_id);
