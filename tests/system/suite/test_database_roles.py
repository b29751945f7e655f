"""The roles with which the embedded PostgreSQL knows the services: enough for all they do, and no more."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.plan import database_url_file
from pawl.launcher.postgres import ROLES
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


async def test_a_gated_call_leaves_entries_that_no_service_can_change(suite: Suite, agent: Agent) -> None:
    """OPS-1: each process is connected as its own role, and the owner has left."""
    run = await agent.start("e-mail eve@example.com about Roles: Each its own")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
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
    owner = await asyncpg.connect(suite.database_url)
    try:
        sessions = await owner.fetch(
            "SELECT DISTINCT usename, split_part(application_name, '-', 2) AS service FROM pg_stat_activity"
            " WHERE application_name LIKE 'pawl-%'"
        )
        assert sorted((row["service"], row["usename"]) for row in sessions) == sorted((role, role) for role in ROLES)
        decided = "SELECT count(*) FROM tool_registry.audit WHERE run_id = $1 AND kind = 'DECIDED'"
        assert await owner.fetchval(decided, run.run_id)
    finally:
        await owner.close()
    for service in ("job-store", "tool-registry"):
        assert not list(suite.process(service).log.told("database.append_only_unprotected"))
