"""The roles with which the embedded PostgreSQL knows the services: enough for all they do, and no more."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from pawl.launcher.plan import database_url_file
from pawl.launcher.postgres import ROLES
from pawl.launcher.suite import Suite

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_each_process_is_connected_as_its_own_role_and_no_owner_is(suite: Suite) -> None:
    """OPS-1: what each role may do is tested in tests/rpc/chassis."""
    for role in ROLES:
        url = (Path(suite.endpoints.secrets) / database_url_file(role)).read_text().strip()
        connection = await asyncpg.connect(url)
        try:
            assert await connection.fetchval("SELECT current_user") == role
            for table in ("tool_registry.audit", "job_store.key_events"):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(f"DELETE FROM {table}")  # noqa: S608  # of the test
        finally:
            await connection.close()
    owner = await asyncpg.connect(suite.database_url)
    sessions = await owner.fetch(
        "SELECT DISTINCT usename, split_part(application_name, '-', 2) AS service FROM pg_stat_activity"
        " WHERE application_name LIKE 'pawl-%'"
    )
    await owner.close()
    assert sorted((row["service"], row["usename"]) for row in sessions) == sorted((role, role) for role in ROLES)
    for service in ("job-store", "tool-registry"):
        assert not list(suite.process(service).log.told("database.append_only_unprotected"))
