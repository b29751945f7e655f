"""One database for all tests of the registry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import databases


@pytest.fixture(scope="session")
def registry_database(postgres_url: str) -> Iterator[databases.ServiceDatabase]:
    """A migrated database."""
    with databases.ServiceDatabase(postgres_url, "tool_registry") as database:
        yield database


@pytest.fixture
def database_url(registry_database: databases.ServiceDatabase) -> str:
    """The URL of a database whose tables are empty."""
    registry_database.empty()
    return registry_database.url
