"""kill -9 of each process in mid-run, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import httpx2
import pytest

from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENDINGS = {"run.completed", "run.failed", "run.cancelled", "run.expired"}


def _shown(events: Sequence[event_pb2.RunEvent]) -> str:
    """The text on the screen of a watcher that drops voided output."""
    pieces: list[tuple[int, str]] = []
    for event in events:
        void_from = event.round_retrying.void_from_seq
        if void_from:
            pieces = [piece for piece in pieces if piece[0] < void_from]
        if event.output_delta.text:
            pieces.append((event.seq, event.output_delta.text))
    return "".join(text for _, text in pieces)


async def owner(suite: Suite) -> int:
    """Which replica of agent-loop holds the one run that is under way, once those of other tests are not any more."""
    pattern = re.compile(r"^pawl_agent_loop_runs_held (\d+)", re.MULTILINE)
    replicas = suite.endpoints.services["agent-loop"]
    held: list[int] = []
    async with httpx2.AsyncClient(timeout=60.0) as http:

        async def is_alone() -> bool:
            texts = [(await http.get(f"http://{replica.metrics}/metrics")).text for replica in replicas]
            held[:] = [int(found[1]) if (found := pattern.search(text)) else 0 for text in texts]
            return sum(held) == 1

        await until(is_alone)
    return held.index(1)


async def _seen(agent: Agent, run_id: str, wanted: Callable[[event_pb2.RunEvent], bool]) -> None:
    """Watch until an event is as wanted."""
    async for event in agent.watch(run_id):
        if wanted(event):
            return
    raise AssertionError("the run ended first")


async def _whole_log(agent: Agent, run_id: str) -> list[event_pb2.RunEvent]:
    await agent.until_ended(run_id)
    events = await agent.events(run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events if event.type in ENDINGS] == [events[-1].type]
    return events


async def test_another_replica_finishes_a_run_whose_owner_is_killed_while_the_model_streams(suite: Suite) -> None:
    """I1, I3, EVT-2: nobody sees text twice, and the answer that is kept is the one that was shown."""
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        run = await agent.start("count to 200 slowly")
        await _seen(agent, run.run_id, lambda event: "3" in event.output_delta.text)
        killed = await owner(suite)
    async with Agent(suite.endpoints.services["agent-loop"][1 - killed].grpc) as survivor:
        suite.kill("agent-loop", killed)
        events = await _whole_log(survivor, run.run_id)
        ended = await survivor.get(run.run_id)
    await suite.wait_ready("agent-loop", killed)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert ended.epoch > 1
    assert [event.round_retrying.reason for event in events if event.HasField("round_retrying")] == ["TAKEOVER"]
    assert _shown(events) == ended.output_text
    assert ended.output_text.split()[-1].startswith("200")


@pytest.mark.parametrize("service", ["job-store", "tool-registry", "notifier"])
async def test_a_run_goes_on_after_a_service_is_killed(suite: Suite, agent: Agent, service: str) -> None:
    """OPS-5: kill -9 of anything loses nothing acknowledged."""
    run = await agent.start("count to 20 slowly, then what is 6 * 7")
    await _seen(agent, run.run_id, lambda event: "2" in event.output_delta.text)
    suite.kill(service)
    events = await _whole_log(agent, run.run_id)
    await suite.wait_ready(service)
    assert events[-1].type == "run.completed"
    assert "42" in (await agent.get(run.run_id)).output_text


async def test_a_run_goes_on_after_postgres_restarts(suite: Suite, agent: Agent) -> None:
    """OPS-5: what was acknowledged is there, the rest is said to have failed."""
    run = await agent.start("count to 20 slowly, then what is 6 * 9")
    await _seen(agent, run.run_id, lambda event: "2" in event.output_delta.text)
    await suite.restart_postgres()
    events = await _whole_log(agent, run.run_id)
    assert events[-1].type == "run.completed"
    assert "54" in (await agent.get(run.run_id)).output_text


async def test_acknowledged_starts_survive_the_ledger_being_killed(suite: Suite, agent: Agent) -> None:
    """I1, I2: each start is repeated with its id until it is acknowledged; each id gives one run."""

    async def start(number: int) -> str:
        while True:
            try:
                run = await agent.start(f"what is {number} * 2?", request_id=f"survivor-{number}")
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
                await asyncio.sleep(0.1)
            else:
                return run.run_id

    starting = [asyncio.create_task(start(number)) for number in range(1, 21)]
    suite.kill("job-store")
    run_ids = await asyncio.gather(*starting)
    await suite.wait_ready("job-store")
    assert len(set(run_ids)) == len(run_ids)
    for number, run_id in enumerate(run_ids, start=1):
        ended = await agent.until_ended(run_id)
        assert str(number * 2) in ended.output_text
        assert (await agent.start(f"what is {number} * 2?", request_id=f"survivor-{number}")).run_id == run_id


async def _start_slow(agent: Agent, tool: str, effects: Path, seconds: float) -> str:
    """Start a run that calls a slow tool; returns once its effect has happened."""
    arguments = json.dumps({"path": str(effects), "seconds": seconds})
    run = await agent.start(f"call {tool} with {arguments}")

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())  # not between its opening and its writing

    await until(happened)
    return run.run_id


async def test_a_tool_is_not_repeated_when_the_loop_that_called_it_is_killed(suite: Suite, tmp_path: Path) -> None:
    """I5: the registry finishes what it began, and the next owner gets that result."""
    effects = tmp_path / "effects"
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        run_id = await _start_slow(agent, "act_once", effects, 6.0)
        killed = await owner(suite)
    async with Agent(suite.endpoints.services["agent-loop"][1 - killed].grpc) as survivor:
        suite.kill("agent-loop", killed)
        await _whole_log(survivor, run_id)
        (call,) = await survivor.calls(run_id)
    await suite.wait_ready("agent-loop", killed)
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    assert call.result.content_json == b'"finished"'
    assert effects.read_text() == "done\n"


async def test_an_effect_whose_process_died_is_said_to_be_unknown(suite: Suite, agent: Agent, tmp_path: Path) -> None:
    """I5: an at-most-once effect is not repeated and not guessed at; the model is told."""
    effects = tmp_path / "effects"
    run_id = await _start_slow(agent, "act_once", effects, 60.0)
    suite.kill("tool-registry")
    events = await _whole_log(agent, run_id)
    await suite.wait_ready("tool-registry")
    (call,) = await agent.calls(run_id)
    assert call.state == call_pb2.CALL_STATE_OUTCOME_UNKNOWN
    assert call.result.is_error
    assert events[-1].type == "run.completed"
    assert effects.read_text() == "done\n"


async def test_a_read_only_call_runs_again_after_its_process_died(suite: Suite, agent: Agent, tmp_path: Path) -> None:
    """I5: what has no effect is simply done again."""
    effects = tmp_path / "effects"
    run_id = await _start_slow(agent, "act_again", effects, 6.0)
    suite.kill("tool-registry")
    await _whole_log(agent, run_id)
    await suite.wait_ready("tool-registry")
    (call,) = await agent.calls(run_id)
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    assert effects.read_text() == "done\ndone\n"


async def test_a_parked_run_survives_everything_being_killed(suite: Suite, agent: Agent) -> None:
    """I1, I3: a question is a row; its answer is taken after every process was replaced."""
    run = await agent.start("book a table")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    names = ["job-store", "tool-registry", "notifier", "agent-loop"]
    for name in names:
        suite.kill(name)
    suite.kill("agent-loop", 1)
    for name in names:
        await suite.wait_ready(name)
    await suite.wait_ready("agent-loop", 1)
    await agent.until(run.run_id, lambda found: found.state == run_pb2.RUN_STATE_WAITING)
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight at 19:00")
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
