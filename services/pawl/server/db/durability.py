"""A check that PostgreSQL's settings protect acknowledged commits against a power failure."""

from __future__ import annotations

from typing import Final

from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError
from pawl.server.db.database import Database

# The risk when each setting is `off`. Every other value waits at least for this server's disk.
_COSTS: Final = {
    "fsync": "a power cut or a crash of the operating system can lose anything and leave the files corrupt",
    "full_page_writes": "a power cut in the middle of a write can leave half-written pages that recovery cannot repair",
    "synchronous_commit": "a crash loses the last commits, although they were acknowledged",
}
# Where a value is set, as pg_settings reports it, and how to remove it.
_REMEDIES: Final = {
    "client": "remove it from PAWL_DATABASE_URL",
    "database": "ALTER DATABASE ... RESET it",
    "user": "ALTER ROLE ... RESET it",
    "database user": "ALTER ROLE ... IN DATABASE ... RESET it",
}
_REMEDY: Final = "set it to on in the server's configuration"
_OFF: Final = "SELECT name, source FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[]) AND setting = 'off'"

_log = logs.get_logger(__name__)


async def require_durable(database: Database, *, unsafe_allowed: bool) -> None:
    """Check that commits of this pool are durable before they are acknowledged.

    This checks the values in effect in a session, including those set for the role, for the database, or in the URL. It
    does not notice later changes. With `unsafe_allowed`, a failed check only logs a warning.

    Raises:
        StartError: One of `fsync`, `full_page_writes` and `synchronous_commit` is off.
        DependencyUnavailable: The server cannot be reached.
    """
    async with database.acquire() as connection:
        records = await connection.fetch(_OFF, list(_COSTS))
    if not records:
        return
    sources = {record["name"]: record["source"] for record in records}
    found = "; ".join(
        f"{name} is off, so {cost} ({_REMEDIES.get(sources[name], _REMEDY)})"
        for name, cost in _COSTS.items()
        if name in sources
    )
    if not unsafe_allowed:
        raise StartError(
            f"PAWL_DATABASE_URL: this database can lose acknowledged commits: {found}."
            " To accept that, set PAWL_DATABASE_UNSAFE=true."
        )
    _log.warning("database.unsafe", problem=found)
