"""The SQL that tells whether a process of the registry lives."""

from __future__ import annotations


def lives(instance: str, unrenewed: str, ends: str) -> str:
    """Return a condition: the process has a lease, or one that only the clock of the database says has ended.

    `unrenewed` and `ends` are the parameters for what `LeaseWatch.unrenewed` returns.
    """
    return f"""EXISTS (
    SELECT FROM tool_registry.instances i WHERE i.instance_id = {instance} AND (
        i.expires_at > clock_timestamp() OR (i.instance_id, i.expires_at) NOT IN (
            SELECT u.holder, u.ended FROM unnest({unrenewed}::text[], {ends}::timestamptz[]) AS u (holder, ended))))"""  # noqa: S608  # constants only
