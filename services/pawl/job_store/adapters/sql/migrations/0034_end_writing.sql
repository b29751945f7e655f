-- The version before knows of no writing: what it makes private is not writable either when it is shared again.
CREATE FUNCTION end_writing() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.writable := false;
    RETURN NEW;
END
$$;
CREATE TRIGGER end_writing BEFORE UPDATE OF sharing ON conversations FOR EACH ROW
WHEN (NEW.sharing = 1 AND NEW.writable) EXECUTE FUNCTION end_writing();
