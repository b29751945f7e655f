-- The runs of the queue whose message came to interrupt, with commas between, as the queue has them.
ALTER TABLE conversations
    ADD COLUMN interrupting text COLLATE "C" NOT NULL DEFAULT '';
