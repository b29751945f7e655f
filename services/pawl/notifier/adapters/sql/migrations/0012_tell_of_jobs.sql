-- The run is a job that ended. The version before reads the row as that of a run.
ALTER TABLE notifications ADD COLUMN is_job boolean NOT NULL DEFAULT false;
