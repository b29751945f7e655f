-- All others whose message has entered a run, with commas between, where several people are needed.
ALTER TABLE runs ADD COLUMN steered_by text COLLATE "C" NOT NULL DEFAULT '';
