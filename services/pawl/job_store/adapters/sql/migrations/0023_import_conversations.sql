-- A run that stands for a history which was imported: it never ran here, and no list of runs has it.
ALTER TABLE runs ADD COLUMN imported boolean NOT NULL DEFAULT false;
