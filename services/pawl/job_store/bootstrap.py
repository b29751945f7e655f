"""The first key of the deployment: `python -m pawl.job_store.bootstrap`, for whoever has access to the database.

It reads PAWL_DATABASE_URL, or the file that PAWL_DATABASE_URL_FILE names, makes the tables if they are not there, and
prints the secret on standard output. While the deployment has a key, it makes none.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from pawl.chassis.db.database import Database
from pawl.chassis.ids import IdSource
from pawl.chassis.process import logs
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.settings import read_secret
from pawl.chassis.process.start import StartError
from pawl.errors import PawlError
from pawl.job_store.keys.keys import Keys, KeysExist, MadeKey
from pawl.job_store.keys.store import PostgresKeyRepository

_START_SECONDS: Final = 5.0
_VARIABLE: Final = "PAWL_DATABASE_URL"


async def bootstrap(database_url: str) -> MadeKey:
    """Make the key.

    Raises:
        KeysExist: the deployment has one.
        StartError: the database cannot be used.
        PawlError: it went away.
    """
    database = Database(database_url, application_name="pawl-bootstrap", start_timeout_seconds=_START_SECONDS)
    async with database:
        await database.create_schema("job_store")
        clock = SystemClock()
        return await Keys(PostgresKeyRepository(database), clock, IdSource(clock)).bootstrap()


def _database_url() -> str:
    try:
        url = read_secret(_VARIABLE, os.environ)
    except ValueError as error:
        raise StartError(str(error)) from None
    if url is None:
        raise StartError(f"{_VARIABLE}: is required")
    return url


def main() -> int:
    """Make the key and print its secret; returns the exit code."""
    logs.configure(service="bootstrap", instance_id="", level="warning", log_format="console")
    try:
        made = asyncio.run(bootstrap(_database_url()))
    except (StartError, KeysExist, PawlError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"Made {made.key.key_id}, a key of the deployment. Its secret is told this once.\n")
    sys.stdout.write(f"{made.secret}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
