"""kill -9 of processes in the middle of what goes on, and what must hold afterwards. Scenes share one kill."""

from __future__ import annotations

import re
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import httpx2
import pytest

from pawl.agent.v1 import operator_pb2, operator_pb2_grpc
from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.scripting import Model
from tests.system.suite import scenes
from tests.system.suite.client import ENDED, Agent, kill, ready

pytestmark = pytest.mark.asyncio(loop_scope="session")

CRASHES_MAX = 3


async def survive(disaster: Callable[[], Awaitable[None]], *played: scenes.Scene) -> None:
    """Bring each scene to its middle, have the disaster, and play each scene to its end."""
    async with AsyncExitStack() as stack:
        for scene in played:
            await stack.enter_async_context(aclosing(scene))
            await anext(scene)
        await disaster()
        for scene in played:
            try:
                assert await anext(scene, "end") == "end"
            except AssertionError as error:
                raise AssertionError(f"{getattr(scene, '__name__', scene)}: {error}") from error


async def test_another_owner_finishes_what_killed_agent_loops_had_begun(
    suite: Suite, agent: Agent, pawl: AsyncClient, tmp_path: Path
) -> None:
    """OPS-5: both replicas are killed in the middle of everything that they drive."""

    async def killed() -> None:
        kill(suite, "agent-loop")
        await ready(suite, "agent-loop")

    await survive(
        killed,
        scenes.a_tool_is_not_repeated(agent, tmp_path / "once"),
        scenes.a_run_hears_of_its_agent(agent, tmp_path / "agent"),
        scenes.an_undo_takes_nothing_back_twice(agent, tmp_path / "undo"),
        scenes.a_call_of_a_front_end_ends_once(pawl),
        scenes.a_decision_is_taken_once(pawl),
        scenes.a_series_keeps_its_beat(pawl),
        scenes.a_stream_is_told_whole_and_once(agent, pawl),
    )


async def test_calls_of_a_killed_registry_end_as_their_class_allows(suite: Suite, agent: Agent, tmp_path: Path) -> None:
    async def killed() -> None:
        kill(suite, "tool-registry")
        await ready(suite, "tool-registry")

    findings = (
        ("RESOLUTION_HAPPENED", '"sent at noon"', "done\n"),
        ("RESOLUTION_RUN_AGAIN", '"finished"', "done\ndone\n"),
        ("RESOLUTION_TELL_MODEL", "An operator found that this call did not happen.", "done\n"),
    )
    await survive(
        killed,
        scenes.an_unknown_outcome_is_told_to_the_model(agent, tmp_path / "once"),
        *(scenes.an_operator_says_what_happened(agent, tmp_path / finding[0], *finding) for finding in findings),
        scenes.a_read_is_made_again(agent, tmp_path / "again"),
        scenes.a_tool_resumes_from_its_checkpoint(agent, tmp_path / "count"),
    )


async def test_runs_go_on_after_postgres_restarts_and_after_one_ledger_is_killed(suite: Suite, agent: Agent) -> None:
    """OPS-4, OPS-5"""

    async def one_killed() -> None:
        suite.kill("job-store", 1)

    await survive(suite.restart_postgres, scenes.a_stream_goes_on(agent))
    await survive(one_killed, scenes.a_stream_goes_on(agent))
    await suite.wait_ready("job-store", 1)


async def test_nothing_acknowledged_is_lost_when_everything_is_killed(
    suite: Suite, agent: Agent, pawl: AsyncClient, effects: Path
) -> None:
    """OPS-5, I1, I3: what waits for people is a row."""
    everything = ("job-store", "tool-registry", "notifier", "agent-loop", "gateway")

    async def killed() -> None:
        kill(suite, *everything)
        await ready(suite, *everything)

    await survive(
        killed,
        scenes.each_due_time_of_a_schedule_has_one_run(suite, pawl),
        scenes.a_call_that_somebody_outside_completes_waits(pawl, effects),
        scenes.its_end_is_told_once(agent, pawl),
        scenes.a_stream_goes_on(agent),
        scenes.acknowledged_starts_are_kept(agent),
    )


async def owner(suite: Suite) -> int:
    """Which replica of agent-loop drives the only run, once those of other tests have ended."""
    held: list[int] = []
    async with httpx2.AsyncClient(timeout=60.0) as http:

        async def is_alone() -> bool:
            pages = [
                (await http.get(f"http://{replica.metrics}/metrics")).text
                for replica in suite.endpoints.services["agent-loop"]
            ]
            found = [re.search(r"^pawl_agent_loop_runs_held (\d+)", page, re.MULTILINE) for page in pages]
            held[:] = [int(match[1]) if match else 0 for match in found]
            return sum(held) == 1

        await until(is_alone)
    return held.index(1)


async def test_a_frozen_owner_that_wakes_up_after_its_lease_changes_nothing(
    suite: Suite, agent: Agent, other_agent: Agent, effects: Path
) -> None:
    """I4, I5: one ending, one effect, no event of the old epoch after one of the new."""
    run_id = await scenes.start_held(agent, "hold_once", effects)
    frozen = await owner(suite)
    survivor = (other_agent, agent)[frozen]
    suite.kill("agent-loop", frozen, signal.SIGSTOP)
    try:
        await survivor.until(run_id, lambda seen: seen.epoch > 1)
    finally:
        suite.kill("agent-loop", frozen, signal.SIGCONT)
    scenes.release(effects)
    epochs = [event.attempt for event in await survivor.whole_log(run_id)]
    assert epochs == sorted(epochs)
    assert effects.read_text() == "done\n"


@pytest.mark.long
async def test_a_run_that_kills_its_workers_is_quarantined_until_an_operator_acts(
    suite: Suite, agent: Agent, model: Model
) -> None:
    """I20, I3: after its third worker it is left alone, and others of its store go on."""
    hang = {"reply": {"text": "never", "fault": {"type": "hang_before_headers"}}}
    operators = operator_pb2_grpc.OperatorServiceStub(agent.channel)
    prompts = await model.play_all([[hang]] * 2)
    poison = [(await agent.start(prompt)).run_id for prompt in prompts]

    async def asked(count: int) -> bool:
        return min([len(await model.outcomes(prompt)) for prompt in prompts]) >= count

    for crash in range(CRASHES_MAX):
        await until(lambda crash=crash: asked(crash + 1))  # type: ignore[misc]
        kill(suite, "agent-loop")
        await ready(suite, "agent-loop")
    for run_id in poison:
        held = await agent.until(run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
        assert (held.attention.reason, held.crash_count) == (run_pb2.ATTENTION_REASON_QUARANTINED, CRASHES_MAX)
    healthy = await agent.start("what is 6 * 7?")
    assert "42" in (await agent.until_ended(healthy.run_id)).output_text
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=agent.metadata)
    assert set(poison) <= {run.run_id for run in page.runs}
    await model.forget()
    redrive = operator_pb2.RedriveRunRequest(run_id=poison[0], reason="the model is mended")
    await operators.RedriveRun(redrive, metadata=(("pawl-user", "helper"),))
    ended = await agent.until_ended(poison[0])
    assert (ended.state, ended.crash_count) == (scenes.COMPLETED, 0)
    end = operator_pb2.EndRunRequest(run_id=poison[1], reason="it is not worth it")
    await operators.EndRun(end, metadata=(("pawl-user", "helper"),))
    ended = await agent.until(poison[1], lambda run: run.state in ENDED)
    assert ended.stop_cause == run_pb2.STOP_CAUSE_OPERATOR
