"""A run that kills its workers, with a suite of its own whose leases are short."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from pawl.agent.v1 import operator_pb2, operator_pb2_grpc
from pawl.event.v1 import event_pb2, run_pb2
from pawl.launcher.options import SuiteOptions
from pawl.launcher.suite import Suite
from tests import commands
from tests.keys import LOCAL_KEY
from tests.system.suite.client import Agent
from tests.system.suite.poison import POISON, PoisonousModel

pytestmark = [
    pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(sys.platform != "linux", reason="who asks the model is found in /proc"),
]

CRASHES_MAX = 3
HEALTHY = 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def suite_and_model() -> AsyncIterator[tuple[Suite, PoisonousModel]]:
    """A suite whose workers ask a poisonous model."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pawl-poison-"))
        suites: list[Suite] = []

        def workers() -> list[int]:
            return [pid for number in range(2) if (pid := suites[0].pid("agent-loop", number)) is not None]

        model = await stack.enter_async_context(PoisonousModel(workers))
        environment = {
            "OPENAI_BASE_URL": model.base_url,
            "PAWL_LEASE_SECONDS": "8",
            "PAWL_LEASE_RENEW_SECONDS": "2",
        }
        options = SuiteOptions(
            data=Path(folder),
            local_key=LOCAL_KEY,
            replicas={"agent-loop": 2},
            service_environment={"agent-loop": environment},
        )
        suites.append(Suite(options))
        suite = await stack.enter_async_context(suites[0])
        model.pass_on_to(suite.endpoints.model_base_url or "")
        yield suite, model


def _states(events: list[event_pb2.RunEvent]) -> list[str]:
    """The changes of state that a run went through."""
    return [event.type for event in events if event.HasField("run_changed")]


async def test_a_run_that_kills_its_workers_is_quarantined_and_the_others_are_not(
    suite_and_model: tuple[Suite, PoisonousModel],
) -> None:
    """I20: after its third worker it is left alone; what shared a worker with it goes on, and completes."""
    suite, model = suite_and_model
    addresses = [replica.grpc for replica in suite.endpoints.services["agent-loop"]]
    async with Agent(addresses[0]) as agent, Agent(addresses[1], user="eve") as eve:
        healthy = [await agent.start(f"count to {60 + number} slowly") for number in range(HEALTHY)]
        # One attempt only: that workers die is no failure of the model.
        one_attempt = run_pb2.RunOptions(limits=run_pb2.RunLimits(model_attempts_max=1))
        poison = await eve.start(f"count to 3 then say {POISON}", options=one_attempt)
        held = await eve.until(poison.run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
        assert (held.attention.reason, held.crash_count) == (run_pb2.ATTENTION_REASON_QUARANTINED, CRASHES_MAX)
        assert model.killed_count == CRASHES_MAX

        for run in healthy:
            ended = await agent.until_ended(run.run_id)
            assert ended.state == run_pb2.RUN_STATE_COMPLETED, ended
            assert "run.needs_attention" not in _states(await agent.events(run.run_id))
        assert model.killed_count == CRASHES_MAX

        listed = await _pawl(suite, "attention")
        assert f"pawl redrive {poison.run_id}" in listed
        assert "quarantined: 3 workers died" in listed
        assert "of eve" in listed
        assert POISON not in listed, "operators do not see what users write"
        model.antidote = True
        assert "is queued again" in await _pawl(suite, "redrive", poison.run_id, "--reason", "the model is mended")
        ended = await eve.until_ended(poison.run_id)
        assert ended.state == run_pb2.RUN_STATE_COMPLETED, ended
        assert ended.crash_count == 0
        (acted,) = [
            event.operator_acted async for event in eve.watch(poison.run_id) if event.HasField("operator_acted")
        ]
        assert (acted.user_id, acted.act, acted.reason) == (
            "me",
            event_pb2.OPERATOR_ACT_REDRIVEN,
            "the model is mended",
        )
        assert "No run needs attention" in await _pawl(suite, "attention")


async def test_a_quarantined_run_is_ended_by_an_operator_or_by_its_user(
    suite_and_model: tuple[Suite, PoisonousModel],
) -> None:
    """I3: a run that nobody can drive can be ended, and what it says is how."""
    suite, model = suite_and_model
    model.antidote = False
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc, user="eve") as eve:
        runs = [await _started(eve, number) for number in range(2)]
        for run in runs:
            await eve.until(run.run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
        operators = operator_pb2_grpc.OperatorServiceStub(eve.channel)
        page = await operators.ListAttention(operator_pb2.ListAttentionRequest(page_size=1), metadata=eve.metadata)
        rest = await operators.ListAttention(
            operator_pb2.ListAttentionRequest(page_token=page.next_page_token), metadata=eve.metadata
        )
        assert {run.run_id for run in (*page.runs, *rest.runs)} == {run.run_id for run in runs}
        elsewhere = (("pawl-store", "elsewhere"),)
        assert not (await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=elsewhere)).runs
        first, second = (run.run_id for run in runs)
        await _pawl(suite, "end", first, "--reason", "it is not worth it")
        await _pawl(suite, "--user", "eve", "cancel", second)
        causes = [(await eve.until_ended(run_id)).stop_cause for run_id in (first, second)]
        assert causes == [run_pb2.STOP_CAUSE_OPERATOR, run_pb2.STOP_CAUSE_USER]
        assert "No run needs attention" in await _pawl(suite, "attention")


async def _started(agent: Agent, number: int) -> run_pb2.Run:
    """The first run may have killed agent-loop by the time that the second is started."""
    while True:
        try:
            return await agent.start(f"say {POISON}", request_id=f"poison-{number}")
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await asyncio.sleep(0.1)


async def _pawl(suite: Suite, *arguments: str) -> str:
    """The output of a command that must work."""
    done = await asyncio.to_thread(commands.pawl, "--data", suite.endpoints.data, *arguments, environment=os.environ)
    assert done.code == 0, done.output + done.errors
    return done.output
