-- What agents keep about users. An agent has at most some hundreds of short ones about a user, so searches read them all.
CREATE TABLE memories (
    store_id   text NOT NULL,
    user_id    text NOT NULL,
    agent_name text NOT NULL COLLATE "C",
    memory_id  text NOT NULL COLLATE "C",
    content    text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (store_id, user_id, agent_name, memory_id)
);
