-- For lists of the runs of a user in some states: few are open among all that there ever were.
CREATE INDEX runs_of_user_in_state ON runs (store_id, user_id, state, create_time, run_id);
