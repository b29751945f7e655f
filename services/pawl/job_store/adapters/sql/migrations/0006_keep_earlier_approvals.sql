-- Approvals of what a call was before it was edited; null for none.
ALTER TABLE calls ADD COLUMN earlier_approvals bytea;
