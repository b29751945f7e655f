-- The indexes of before make room for those that were built. The calls have a migration of their own: no transaction
-- holds both tables.
ALTER TABLE runs DROP CONSTRAINT runs_pkey, ADD CONSTRAINT runs_pkey PRIMARY KEY USING INDEX runs_by_id;
DROP INDEX runs_of_user, runs_of_user_in_state, runs_of_conversation, runs_of_parent, runs_jobs;
ALTER INDEX runs_by_user RENAME TO runs_of_user;
ALTER INDEX runs_by_user_in_state RENAME TO runs_of_user_in_state;
ALTER INDEX runs_by_conversation RENAME TO runs_of_conversation;
ALTER INDEX runs_by_parent RENAME TO runs_of_parent;
ALTER INDEX runs_by_report RENAME TO runs_jobs;
