-- The part of a token budget that top-ups have added: a turn of the model does not get it.
ALTER TABLE runs ADD COLUMN topped_up_tokens bigint NOT NULL DEFAULT 0;
