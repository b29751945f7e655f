"""The roles with which the embedded PostgreSQL knows the services: enough for all they do, and no more."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import asyncpg
import pytest

from pawl.chassis.database import Database
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.plan import database_url_file
from pawl.launcher.postgres import ROLES
from pawl.launcher.services import STAGES
from pawl.launcher.suite import Suite
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

FORBIDDEN = (
    "UPDATE tool_registry.audit SET verdict = ''",
    "DELETE FROM tool_registry.audit",
    "TRUNCATE tool_registry.audit",
    "ALTER TABLE tool_registry.audit DISABLE TRIGGER ALL",
    "DROP TABLE tool_registry.audit",
    "UPDATE job_store.key_events SET kind = ''",
    "DELETE FROM job_store.key_events",
    "TRUNCATE job_store.key_events",
    "DROP SCHEMA tool_registry CASCADE",
    "CREATE SCHEMA mine",
    "CREATE TEMPORARY TABLE mine ()",
)


async def check_roles(suite: Suite) -> None:
    """Have PostgreSQL refuse what no service's role may do."""
    for role in ROLES:
        url = (Path(suite.endpoints.secrets) / database_url_file(role)).read_text().strip()
        connection = await asyncpg.connect(url)
        try:
            assert await connection.fetchval("SELECT current_user") == role
            others = [f"SELECT 1 FROM {other}.migrations" for other in ROLES if other != role]  # noqa: S608
            for statement in (*FORBIDDEN, *others):
                with pytest.raises(asyncpg.InsufficientPrivilegeError):
                    await connection.execute(statement)
        finally:
            await connection.close()


async def sessions(suite: Suite) -> dict[str, set[str]]:
    """The roles of the sessions that are open, by service."""
    connection = await asyncpg.connect(suite.database_url)
    try:
        rows = await connection.fetch(
            "SELECT usename, split_part(application_name, '-', 2) AS service FROM pg_stat_activity"
            " WHERE application_name LIKE 'pawl-%'"
        )
    finally:
        await connection.close()
    return {row["service"]: {other["usename"] for other in rows if other["service"] == row["service"]} for row in rows}


async def test_a_gated_call_leaves_entries_that_no_service_can_change(suite: Suite, agent: Agent) -> None:
    """OPS-1: each process is connected as its own role, and the owner has left."""
    run = await agent.start("e-mail eve@example.com about Roles: Each its own")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    assert await sessions(suite) == {role: {role} for role in ROLES}
    await check_roles(suite)
    connection = await asyncpg.connect(suite.database_url)
    found = "SELECT count(*) FROM tool_registry.audit WHERE run_id = $1 AND kind = 'DECIDED'"
    assert await connection.fetchval(found, run.run_id)
    await connection.close()
    for service in ("job-store", "tool-registry"):
        assert not list(suite.process(service).log.told("database.append_only_unprotected"))


async def test_a_folder_of_before_gets_the_roles() -> None:
    """One role was the services' and the owner: what it owns stays, and the services have it no more."""
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        options = SuiteOptions(data=Path(folder) / "data", scripted_model=False, stages=())
        async with Suite(options) as suite:
            await _make_old(suite)
        for role in ROLES:
            (Path(folder) / f"data/secrets/postgres-{role}").unlink()
        async with Suite(dataclasses.replace(options, stages=STAGES[:2])) as suite:
            assert await sessions(suite) == {role: {role} for role in ROLES}
            await check_roles(suite)
            connection = await asyncpg.connect(suite.database_url)
            assert await connection.fetchval("SELECT seq FROM tool_registry.audit_heads") == 7
            await connection.close()


async def _make_old(suite: Suite) -> None:
    async with Database(suite.database_url, application_name="before") as database:
        for schema in ROLES:
            await database.migrate(schema, f"pawl.{schema}.adapters.sql.migrations")
        await database.execute("INSERT INTO tool_registry.audit_heads VALUES ('acme', 7, 'x')")
    password = (Path(suite.endpoints.secrets) / "postgres-superuser").read_text().strip()
    host, port = (suite.endpoints.postgres or "").split(":")
    admin = await asyncpg.connect(host=host, port=int(port), user="postgres", password=password, database="pawl")
    for role in ROLES:
        await admin.execute(f"DROP ROLE {role}")
    await admin.execute("GRANT TEMPORARY ON DATABASE pawl TO PUBLIC")
    await admin.close()
