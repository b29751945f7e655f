"""What a process says of itself is what it can do."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc
import httpx2
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pawl.agent.v1 import agent_pb2, agent_pb2_grpc
from pawl.chassis.endpoints import Replica
from pawl.launcher.suite import Suite
from tests.keys import keyed_channel
from tests.poll import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _page(replica: Replica) -> tuple[int, dict[str, Any]]:
    async with httpx2.AsyncClient(timeout=60.0) as http:
        answer = await http.get(f"http://{replica.metrics}/healthz")
    return answer.status_code, answer.json()["checks"]


async def _serves(replica: Replica) -> bool:
    async with grpc.aio.insecure_channel(replica.grpc) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status = (await stub.Check(health_pb2.HealthCheckRequest())).status
    return bool(status == health_pb2.HealthCheckResponse.SERVING)


async def test_an_agent_loop_without_job_store_says_that_it_cannot_serve(suite: Suite) -> None:
    """OPS-2: as the others say of their database; and it says so no more when job-store is back."""
    replica = suite.endpoints.services["agent-loop"][0]
    registry = suite.endpoints.services["tool-registry"][0]

    async def is_down() -> bool:
        status, checks = await _page(replica)
        return status == 503 and checks["job_store"] != "ok" and not await _serves(replica)

    async def is_up() -> bool:
        return (await _page(replica)) == (200, {"nats": "ok", "job_store": "ok", "tool_registry": "ok"})

    async def both_serve() -> bool:
        return await is_up() and await _serves(replica) and (await _page(registry))[1]["job_store"] == "ok"

    await until(both_serve)
    await suite.stop_process("job-store")
    try:
        await until(is_down)
        # The registry can do without: it only reads long results there.
        assert await _serves(registry)
    finally:
        await suite.start_process("job-store")
    await until(both_serve)


async def test_a_gateway_without_agent_loop_says_that_it_cannot_serve(suite: Suite) -> None:
    """One replica is enough; and without tool-registry it can: calls that need that say so themselves."""
    url = f"http://{suite.endpoints.services['gateway'][0].http}/healthz"

    async def said() -> tuple[int, dict[str, Any]]:
        async with httpx2.AsyncClient(timeout=60.0) as http:
            answer = await http.get(url)
        return answer.status_code, {name: state == "ok" for name, state in answer.json()["checks"].items()}

    async def says(status: int, **is_there: bool) -> bool:
        return await said() == (status, {"agent_loop": True, "tool_registry": True, "notifier": True} | is_there)

    await until(lambda: says(200))
    await suite.stop_process("agent-loop", 0)
    try:
        await until(lambda: says(200))
        await suite.stop_process("agent-loop", 1)
        try:
            await until(lambda: says(503, agent_loop=False))
        finally:
            await suite.start_process("agent-loop", 1)
    finally:
        await suite.start_process("agent-loop", 0)
    await until(lambda: says(200))
    await suite.stop_process("tool-registry")
    try:
        await until(lambda: says(200, tool_registry=False))
    finally:
        await suite.start_process("tool-registry")
    await until(lambda: says(200))


async def test_a_frozen_database_is_unavailable_whatever_deadline_the_client_gave(suite: Suite) -> None:
    """And health says so; when it goes on, so does everything, without a restart."""
    replica = suite.endpoints.services["agent-loop"][0]
    stores = suite.endpoints.services["job-store"][0]

    async def is_up() -> bool:
        return await _serves(replica) and await _serves(stores)

    async def is_down() -> bool:
        return (await _page(stores))[0] == 503 and not await _serves(replica)

    await until(is_up)
    process_id = suite.pid("postgres")
    assert process_id is not None
    family = [psutil.Process(process_id), *psutil.Process(process_id).children(recursive=True)]
    async with keyed_channel(replica.grpc) as channel:
        stub: Any = agent_pb2_grpc.AgentServiceStub(channel)
        for process in family:
            process.suspend()
        try:
            request = agent_pb2.StartRunRequest(request_id="frozen", text="hello")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.StartRun(request, timeout=120)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await until(is_down)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        await until(is_up)
