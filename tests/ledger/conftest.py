"""Two connections to a ledger whose clock moves only when a test moves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from pawl.server.db.database import Database
from tests.ledger.stores import stop_clock


@pytest.fixture
async def frozen_url(database_url: str) -> str:
    """The URL of a ledger with a frozen clock."""
    async with Database(database_url, application_name="test") as database:
        await database.create_schema("job_store")
    await stop_clock(database_url)
    return database_url


@pytest.fixture
async def databases(frozen_url: str) -> AsyncIterator[Sequence[Database]]:
    async with Database(frozen_url, application_name="one") as one, Database(frozen_url, application_name="two") as two:
        yield one, two
