-- The series that can be granted with a call, and the grant of the job, packed; null for none.
ALTER TABLE calls ADD COLUMN series bytea;
ALTER TABLE runs ADD COLUMN series_grant bytea;
