"""What a process says of itself is what it can do."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.chassis.endpoints import Replica
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.suite import refusals
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _page(replica: Replica) -> tuple[int, dict[str, bool]]:
    """What /healthz says: the status, and which checks are fine."""
    async with httpx2.AsyncClient(timeout=60.0) as http:
        answer = await http.get(f"http://{replica.metrics or replica.http}/healthz")
    return answer.status_code, {name: state == "ok" for name, state in answer.json()["checks"].items()}


async def _serves(replica: Replica) -> bool:
    async with grpc.aio.insecure_channel(replica.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = (await stub.Check(health_pb2.HealthCheckRequest())).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def test_without_job_store_agent_loop_and_gateway_say_that_they_cannot_serve(suite: Suite) -> None:
    """OPS-2: one replica is enough, tool-registry can do without, and all is well again afterwards."""
    loop, gateway, registry = (suite.endpoints.services[name][0] for name in ("agent-loop", "gateway", "tool-registry"))
    door = Replica(grpc="", http=gateway.http, metrics="", pid=None, ready=True)

    async def are(*, there: bool) -> bool:
        status = 200 if there else 503
        loop_page, door_page = await _page(loop), await _page(door)
        expected = {"nats": True, "job_store": there, "tool_registry": True}
        found = (loop_page, await _serves(loop), door_page[0], door_page[1]["agent_loop"])
        return found == ((status, expected), there, status, there)

    await until(lambda: are(there=True))
    await suite.stop_process("job-store", 0)
    try:
        await until(lambda: are(there=True))
        await suite.stop_process("job-store", 1)
        try:
            await until(lambda: are(there=False))
            assert await _serves(registry)
        finally:
            await suite.start_process("job-store", 1)
    finally:
        await suite.start_process("job-store", 0)
    await until(lambda: are(there=True))


async def test_a_frozen_database_is_unavailable_and_nothing_needs_a_restart_afterwards(
    suite: Suite, agent: Agent
) -> None:
    loop, stores = (suite.endpoints.services[name][0] for name in ("agent-loop", "job-store"))

    async def is_up() -> bool:
        return await _serves(loop) and await _serves(stores)

    async def is_down() -> bool:
        return (await _page(stores))[0] == 503 and not await _serves(loop)

    await until(is_up)
    process_id = suite.pid("postgres")
    assert process_id is not None
    family = [psutil.Process(process_id), *psutil.Process(process_id).children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        refused = await refusals.outcome(agent.start("hello", request_id="frozen"))
        assert refused.code is grpc.StatusCode.UNAVAILABLE
        await until(is_down)
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    await until(is_up)
