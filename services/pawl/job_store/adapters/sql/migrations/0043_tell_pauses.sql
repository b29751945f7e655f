-- The pause, which a schedule or a trigger made by itself, of which its user was told.
ALTER TABLE schedules ADD COLUMN told_time timestamptz;
ALTER TABLE triggers ADD COLUMN told_time timestamptz;
-- Those of before are known by now.
UPDATE schedules SET told_time = pause_time WHERE self_paused;
UPDATE triggers SET told_time = pause_time WHERE self_paused;
CREATE INDEX schedules_untold ON schedules (pause_time) WHERE self_paused AND told_time IS DISTINCT FROM pause_time;
CREATE INDEX triggers_untold ON triggers (pause_time) WHERE self_paused AND told_time IS DISTINCT FROM pause_time;
