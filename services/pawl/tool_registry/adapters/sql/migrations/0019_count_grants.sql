-- The calls that began under a grant of a series: each counts once, and no two are the same use.
CREATE TABLE grant_uses (
    store_id text NOT NULL,
    call_id  text NOT NULL,
    digest   text NOT NULL COLLATE "C",
    number   integer NOT NULL,
    used_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (store_id, call_id, digest),
    UNIQUE (store_id, digest, number)
);

CREATE INDEX grant_uses_time ON grant_uses (used_at);
