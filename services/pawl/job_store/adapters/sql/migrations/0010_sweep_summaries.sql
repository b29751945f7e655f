-- For the retention sweep: summaries whose older runs are still there.
ALTER TABLE messages ADD COLUMN swept boolean NOT NULL DEFAULT false;
CREATE INDEX messages_unswept ON messages (create_time) WHERE summarised_to > 0 AND NOT swept;
