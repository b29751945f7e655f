"""On one machine, too, nobody calls without the key of the suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent.v1.agent_pb2_grpc import AgentServiceStub
from pawl.batch.v1.batch_pb2_grpc import BatchServiceStub
from pawl.chassis.roles import ROLES, Role
from pawl.event.v1 import call_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceStub
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1.notify_pb2_grpc import NotifyServiceStub
from pawl.tool.v1 import execution_pb2, source_pb2, source_pb2_grpc
from pawl.tool.v1.execution_pb2_grpc import ExecutionServiceStub
from pawl.tool.v1.source_pb2_grpc import SourceServiceStub
from tests.fakes.mcp_program import stdio_config
from tests.keys import METADATA, keyed_channel
from tests.system.access.walk import served, walk, wrong
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALLS: list[tuple[str, Any, str, Any]] = [
    ("agent-loop", AgentServiceStub, "ListRuns", agent_pb2.ListRunsRequest()),
    ("job-store", LedgerServiceStub, "ClaimRuns", ledger_pb2.ClaimRunsRequest(worker_id="w", runs_max=1)),
    ("notifier", NotifyServiceStub, "ListNotifications", notify_pb2.ListNotificationsRequest()),
    ("tool-registry", SourceServiceStub, "ListSources", source_pb2.ListSourcesRequest()),
    ("tool-registry", ExecutionServiceStub, "CheckCalls", execution_pb2.CheckCallsRequest()),
]


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[2])
@pytest.mark.parametrize("shown", [(), (("authorization", "Bearer of-something-else"),), (("pawl-user", "me"),)])
async def test_without_the_key_no_listener_answers(
    suite: Suite, call: tuple[str, Any, str, Any], shown: tuple[tuple[str, str], ...]
) -> None:
    """OPS-1."""
    service, stub, method, request = call
    for replica in suite.endpoints.services[service]:
        async with grpc.aio.insecure_channel(replica.grpc) as channel:
            code = await code_of(getattr(stub(channel), method)(request, metadata=shown))
            assert code is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("service", ["job-store", "tool-registry"])
async def test_what_is_for_services_wants_their_key(suite: Suite, service: str) -> None:
    """OPS-1: the key of a person does not do."""
    async with grpc.aio.insecure_channel(suite.endpoints.services[service][0].grpc) as channel:
        stub: Any = BatchServiceStub(channel)
        for shown, expected in (((), "UNAUTHENTICATED"), (METADATA, "PERMISSION_DENIED")):
            # Nothing is written: a client that writes to a stream refused meanwhile may take that for INTERNAL.
            assert (await code_of(stub.Batch(metadata=shown).read())).name == expected


@pytest.mark.parametrize("listener", ["agent-loop", "tool-registry", "job-store", "notifier"])
@pytest.mark.parametrize(
    ("more", "callers"),
    [((), ROLES - {Role.DELEGATE, Role.DEPLOYMENT}), ((("pawl-roles", "viewer"),), {Role.VIEWER})],
    ids=["with every role", "with one"],
)
async def test_the_local_key_calls_what_the_table_says(
    suite: Suite, listener: str, more: tuple[tuple[str, str], ...], callers: set[str]
) -> None:
    """OPS-1."""
    address = suite.endpoints.services[listener][0].grpc
    async with grpc.aio.insecure_channel(address) as channel:
        answers = await walk(channel, await served(channel, METADATA), (*METADATA, *more))
    assert wrong({(listener, name): answer for name, answer in answers.items()}, callers, "PERMISSION_DENIED") == {}


async def test_a_program_that_the_registry_starts_cannot_read_the_key(
    suite: Suite, agent: Agent, tmp_path: Path
) -> None:
    """OPS-1: so it cannot call either, although it runs on this machine; not even if it may read everything."""
    tools = [{"name": "read", "description": "Reads.", "inputSchema": {"type": "object"}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    config = source_pb2.SourceConfig(
        name="thief",
        mcp_stdio=stdio_config(tmp_path, readable_paths=["/"]),
        policies=[source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)],
    )
    secrets = Path(suite.endpoints.secrets)
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        stub = source_pb2_grpc.SourceServiceStub(channel)
        await stub.AddSource(source_pb2.AddSourceRequest(config=config))
        try:
            for path in (secrets / "local-key", secrets / "service-key-agent-loop", secrets / "database.url"):
                assert "Permission denied" in await answer(
                    agent, f"call thief__read with {json.dumps({'path': str(path)})}"
                )
            mine = json.dumps({"path": str(tmp_path / "tools.json")})
            assert "Reads." in await answer(agent, f"call thief__read with {mine}")
        finally:
            await stub.RemoveSource(source_pb2.RemoveSourceRequest(name="thief"))


async def answer(agent: Agent, text: str) -> str:
    """What the only call of a run returned."""
    run = await agent.start(text)
    await agent.until_ended(run.run_id)
    request = agent_pb2.ListCallsRequest(run_id=run.run_id)
    (call,) = (await agent.stub.ListCalls(request, metadata=agent.metadata)).calls
    return call.result.content_json.decode()
