-- Runs that began on a day, and what model calls used on it, by agent and user; days are those of UTC. A count is spread
-- over slots, so that transactions which add to it at the same time seldom wait for each other.
CREATE TABLE usage_days (
    store_id text COLLATE "C" NOT NULL,
    agent_name text COLLATE "C" NOT NULL,
    day date NOT NULL,
    user_id text COLLATE "C" NOT NULL,
    slot smallint NOT NULL,
    runs bigint NOT NULL,
    input_tokens bigint NOT NULL,
    cached_input_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    reasoning_tokens bigint NOT NULL,
    model_calls bigint NOT NULL,
    estimated_tokens bigint NOT NULL,
    PRIMARY KEY (store_id, agent_name, day, user_id, slot)
) WITH (fillfactor = 50);
CREATE INDEX usage_days_old ON usage_days (day);
