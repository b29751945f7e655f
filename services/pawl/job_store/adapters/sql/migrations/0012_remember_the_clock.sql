-- A time that the clock has had, in one row: a replica that starts later can tell that the clock went back.
CREATE TABLE clock (
    is_only boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    seen_time timestamptz NOT NULL
);
INSERT INTO clock (seen_time) VALUES (clock_timestamp());
