"""A check that a PostgreSQL keeps what it has acknowledged, also when the power goes."""

from __future__ import annotations

from typing import Final

from pawl.chassis.db.database import Database
from pawl.chassis.process import logs
from pawl.chassis.process.start import StartError

# What an `off` of each setting costs. Every other value waits for the disk of this server at least.
_COSTS: Final = {
    "fsync": "a power cut or a crash of the operating system can lose anything and leave the files corrupt",
    "full_page_writes": "a power cut in the middle of a write can leave half-written pages that recovery cannot mend",
    "synchronous_commit": "a crash loses the last commits, though they were acknowledged",
}
# Where a value comes from, as pg_settings says it, and what to do there.
_REMEDIES: Final = {
    "client": "take it out of PAWL_DATABASE_URL",
    "database": "ALTER DATABASE ... RESET it",
    "user": "ALTER ROLE ... RESET it",
    "database user": "ALTER ROLE ... IN DATABASE ... RESET it",
}
_REMEDY: Final = "set it to on in the server's configuration"
_OFF: Final = "SELECT name, source FROM pg_catalog.pg_settings WHERE name = ANY ($1::text[]) AND setting = 'off'"

_log = logs.get_logger(__name__)


async def require_durable(database: Database, *, unsafe_allowed: bool) -> None:
    """Return if a commit of a session of this pool is durable before it is acknowledged.

    Looks at the values that hold in a session, so also at those that were set for
    the role, the database or in the URL. What is changed later is not noticed.
    With `unsafe_allowed`, a database that fails is used all the same, and the log
    says so.

    Raises:
        StartError: fsync, full_page_writes or synchronous_commit is off.
        DependencyUnavailable: the server cannot be reached.
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
            f"PAWL_DATABASE_URL: this database does not keep what it acknowledges: {found}."
            " Where that does not matter, set PAWL_DATABASE_UNSAFE=true."
        )
    _log.warning("database.unsafe", problem=found)
