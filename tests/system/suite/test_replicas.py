"""Two of each service: calls stay together at the replica that their store prefers, and leave it when it is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import grpc
import pytest

from pawl.event.v1 import run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

SERVICES = ("job-store", "tool-registry")


async def test_runs_go_on_whichever_replica_is_killed() -> None:
    """OPS-4, OPS-5."""
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        replicas = dict.fromkeys(("agent-loop", *SERVICES, "notifier"), 2)
        async with (
            Suite(SuiteOptions(data=Path(folder), local_key=LOCAL_KEY, replicas=replicas)) as suite,
            Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent,
            Agent(suite.endpoints.services["agent-loop"][1].grpc) as other,
        ):
            for replica in (0, 1):
                runs = [await each.start("count to 20 slowly, then what is 6 * 7") for each in (agent, other)]
                async for event in agent.watch(runs[0].run_id):
                    if "2" in event.output_delta.text:
                        break
                for service in SERVICES:
                    suite.kill(service, replica)
                for run in runs:
                    await agent.until_ended(run.run_id)
                    events = await other.events(run.run_id)
                    assert [event.seq for event in events] == list(range(1, len(events) + 1))
                    assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
                for service in SERVICES:
                    await suite.wait_ready(service, replica)


async def test_clients_and_runs_may_have_processes_of_their_own() -> None:
    """PAWL_ROLE: who serves clients drives nothing, who drives serves nobody, and watchers see all events."""
    roles = {"agent-loop": {"PAWL_ROLE": "api"}, "agent-loop-1": {"PAWL_ROLE": "worker"}}
    with tempfile.TemporaryDirectory(prefix="pawl-suite-") as folder:
        options = SuiteOptions(
            data=Path(folder), local_key=LOCAL_KEY, replicas={"agent-loop": 2}, service_environment=roles
        )
        async with Suite(options) as suite:
            serving, driving = suite.endpoints.services["agent-loop"]
            async with Agent(serving.grpc) as agent, Agent(driving.grpc) as nobody:
                run = await agent.start("what is 6 * 7")
                await agent.until_ended(run.run_id)
                events = await agent.events(run.run_id)
                assert [event.seq for event in events] == list(range(1, len(events) + 1))
                assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await nobody.start("what is 6 * 7")
                assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED
                await suite.stop_process("agent-loop", 1)
                waiting = await agent.start("what is 6 * 7")
                assert (await agent.get(waiting.run_id)).state == run_pb2.RUN_STATE_QUEUED
                await suite.start_process("agent-loop", 1)
                await agent.until_ended(waiting.run_id)
