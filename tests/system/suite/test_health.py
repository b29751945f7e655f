"""What a process says of itself is what it can do, and its role in the database is its own."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.chassis.rpc.endpoints import Replica
from pawl.launcher.plan import database_url_file
from pawl.launcher.postgres import ROLES
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.suite import refusals
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _page(replica: Replica) -> tuple[int, dict[str, bool]]:
    """What /healthz says: the status, and which checks are fine."""
    async with httpx2.AsyncClient(timeout=60.0) as http:
        answer = await http.get(f"http://{replica.http or replica.metrics}/healthz")
    return answer.status_code, {name: state == "ok" for name, state in answer.json()["checks"].items()}


async def _serves(replica: Replica) -> bool:
    async with grpc.aio.insecure_channel(replica.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = (await stub.Check(health_pb2.HealthCheckRequest())).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def test_what_cannot_serve_says_so_and_recovers_without_a_restart(suite: Suite, agent: Agent) -> None:
    """OPS-2: with a frozen database job-store, agent-loop and gateway cannot, and requests are UNAVAILABLE."""
    loop, stores, gateway = (suite.endpoints.services[name][0] for name in ("agent-loop", "job-store", "gateway"))

    async def all_serve() -> bool:
        return (
            await _page(loop) == (200, dict.fromkeys(("nats", "job_store", "tool_registry"), True))
            and (await _page(gateway))[0] == 200
            and await _serves(loop)
            and await _serves(stores)
        )

    async def none_serves() -> bool:
        status, checks = await _page(gateway)
        return (
            (status, checks["agent_loop"], (await _page(stores))[0]) == (503, False, 503)
            and not await _serves(loop)
            and not (await _page(loop))[1]["job_store"]
        )

    await until(all_serve)
    process_id = suite.pid("postgres")
    assert process_id is not None
    family = [psutil.Process(process_id), *psutil.Process(process_id).children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        refused = await refusals.outcome(agent.start("hello", request_id="frozen"))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        await until(none_serves)
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    await until(all_serve)


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
