"""Creates the deployment's first key: `python -m pawl.job_store.bootstrap`.

Reads PAWL_DATABASE_URL, or the file named by PAWL_DATABASE_URL_FILE. Creates missing tables and prints the secret to
standard output. Fails if the deployment already has a key.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.process.start import StartError
from pawl.errors import PawlError
from pawl.job_store.keys.keys import Keys, KeysExist, MadeKey
from pawl.job_store.keys.store import PostgresKeyRepository
from pawl.server.db.database import Database
from pawl.server.process import log_setup
from pawl.server.process.settings import read_secret

_START_SECONDS: Final = 5.0
_VARIABLE: Final = "PAWL_DATABASE_URL"


async def bootstrap(database_url: str) -> MadeKey:
    """Create the deployment's first key.

    Raises:
        KeysExist: The deployment already has a key.
        StartError: The database cannot be used.
        PawlError: The database became unavailable.
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
        raise StartError(f"{_VARIABLE} is required")
    return url


def main() -> int:
    log_setup.configure(service="bootstrap", instance_id="", level="warning", log_format="console")
    try:
        made = asyncio.run(bootstrap(_database_url()))
    except (StartError, KeysExist, PawlError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stderr.write(f"Created deployment key {made.key.key_id}. Its secret is shown only once.\n")
    sys.stdout.write(f"{made.secret}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
