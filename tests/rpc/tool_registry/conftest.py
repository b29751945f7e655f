"""One database for all tests of the registry."""

from __future__ import annotations

import pytest

from tests import databases


@pytest.fixture(scope="session")
def registry_database_url(postgres_url: str) -> str:
    """The URL of a migrated database."""
    return databases.create(postgres_url, "tool_registry")


@pytest.fixture
def database_url(registry_database_url: str) -> str:
    """The URL of a database whose tables are empty."""
    databases.empty(registry_database_url, "tool_registry")
    return registry_database_url
