"""kill -9 of processes during their work, and the guarantees afterwards. Several checks share one kill."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
import pytest

from pawl.agent.v1 import agent_pb2
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests import servers
from tests.fakes.otlp_receiver import Received, Receiver
from tests.poll import until
from tests.system.suite.client import PATIENCE_SECONDS, Agent, kill

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def survive(disaster: Callable[[], Awaitable[None]], *played: Scene) -> None:
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


async def test_another_agent_loop_finishes_the_runs_of_a_killed_one(
    suite: Suite, agent: Agent, pawl: AsyncClient, receiver: Receiver, tmp_path: Path
) -> None:
    """OPS-5: both replicas are killed while they drive runs."""
    await survive(
        partial(kill, suite, "agent-loop"),
        trace_continues_without_the_lost_span(agent, receiver, tmp_path / "traced"),
        a_tool_is_not_repeated(agent, tmp_path / "once"),
        conversation_is_followed_without_repeats(pawl, tmp_path / "job"),
        # Last, because its run ends soon.
        stream_is_complete_without_repeats(agent, pawl),
    )


async def test_runs_survive_a_postgres_restart_and_a_killed_job_store(suite: Suite, agent: Agent) -> None:
    """OPS-4, OPS-5: a stream continues after both faults."""

    async def one_killed() -> None:
        suite.kill("job-store", 1)

    await survive(partial(servers.restart, suite, "postgres"), stream_continues(agent))
    await survive(one_killed, stream_continues(agent))
    await suite.wait_ready("job-store", 1)


async def test_acknowledged_data_survives_killing_everything(suite: Suite, agent: Agent) -> None:
    """OPS-5, I1, I3: all replicas of all services are killed."""
    everything = ("job-store", "tool-registry", "notifier", "agent-loop", "gateway")
    await survive(
        partial(kill, suite, *everything),
        stream_continues(agent),
        acknowledged_starts_are_kept(agent),
    )


Scene: TypeAlias = AsyncGenerator[None, None]

COMPLETED: Final = run_pb2.RUN_STATE_COMPLETED


async def start_held(agent: Agent, tool: str, path: Path, **options: Any) -> str:
    run = await agent.start(f"call {tool} with {json.dumps({'path': str(path)})}", **options)
    await is_held(path)
    return run.run_id


async def is_held(path: Path) -> None:
    await until(path.with_suffix(".held").exists)


def release(path: Path) -> None:
    path.with_suffix(".go").touch()


def shown(events: Sequence[event_pb2.RunEvent]) -> str:
    """Return the text on the screen of a watcher that drops voided output."""
    pieces: list[tuple[int, str]] = []
    for event in events:
        void_from = event.round_retrying.void_from_seq
        if void_from:
            pieces = [piece for piece in pieces if piece[0] < void_from]
        if event.output_delta.text:
            pieces.append((event.seq, event.output_delta.text))
    return "".join(text for _, text in pieces)


async def _seen(agent: Agent, run_id: str, text: str) -> None:
    async for event in agent.watch(run_id):
        if text in event.output_delta.text:
            return
    raise AssertionError("the run ended first")


async def stream_is_complete_without_repeats(agent: Agent, pawl: AsyncClient) -> Scene:
    """I1, I3, EVT-1, EVT-2, OPS-4: the reader is a watcher, a text client or a front end that reconnects."""
    lost = asyncio.Event()
    async with pawl.session(on_lost=lost.set) as session:
        run_id = await session.start("count to 60 slowly")

        async def read_text() -> str:
            text = ""
            async for piece in pawl.text(run_id):
                text = text[: len(text) - piece.takes_back] + piece
            return text

        async def read_frames() -> list[int]:
            seqs = []
            async for frame in session:
                if frame.HasField("end"):
                    break
                seqs.append(frame.event.seq)
            return seqs

        text, frames = asyncio.create_task(read_text()), asyncio.create_task(read_frames())
        await _seen(agent, run_id, "3")
        yield
        events = await agent.whole_log(run_id)
        ended = await agent.get(run_id)
        assert (ended.state, ended.epoch > 1) == (COMPLETED, True)
        assert [event.round_retrying.reason for event in events if event.HasField("round_retrying")] == ["TAKEOVER"]
        assert shown(events) == await text == ended.output_text
        assert ended.output_text.split()[-1].startswith("60")
        assert lost.is_set()
        assert await frames == [event.seq for event in events]


async def a_tool_is_not_repeated(agent: Agent, path: Path) -> Scene:
    """I5: the registry finishes the call it started, and the next owner gets that result."""
    run_id = await start_held(agent, "hold_once", path)
    yield
    release(path)
    await agent.whole_log(run_id)
    (call,) = await agent.calls(run_id)
    assert (call.state, call.result.content_json) == (call_pb2.CALL_STATE_SUCCEEDED, b'"finished"')
    assert path.read_text() == "done\n"


async def trace_continues_without_the_lost_span(agent: Agent, receiver: Receiver, path: Path) -> Scene:
    """OPS-2: the next worker's span has the lost one as its parent."""
    trace_id = secrets.token_hex(16)
    request = agent_pb2.StartRunRequest(text=f"call hold_once with {json.dumps({'path': str(path)})}")
    metadata = (*agent.metadata, ("traceparent", f"00-{trace_id}-{'b' * 16}-01"))
    run_id = (await agent.stub.StartRun(request, metadata=metadata)).run.run_id
    await is_held(path)
    first = (await agent.until(run_id, lambda run: run.trace != run.traceparent)).trace.split("-")[2]
    yield
    release(path)
    await agent.until_ended(run_id)
    spans = await asyncio.to_thread(receiver.wait, lambda spans: any(_ends(span, run_id) for span in spans))
    drive = next(span for span in spans if _ends(span, run_id))
    assert (drive.trace_id, drive.parent, drive.links) == (trace_id, first, (f"{trace_id}-{first}",))
    assert drive.attributes["pawl.resumed"]
    of_run = [span for span in spans if span.attributes.get("pawl.run.id") == run_id]
    assert first not in {span.span_id for span in of_run}
    assert {span.trace_id for span in of_run} == {trace_id}
    names = {span.name.partition(" ")[0] for span in of_run if span.parent == drive.span_id}
    assert names == {"chat", "execute_tool"}


def _ends(span: Received, run_id: str) -> bool:
    return span.attributes.get("pawl.run.id") == run_id and span.attributes.get("pawl.run.left") == "ended"


async def conversation_is_followed_without_repeats(pawl: AsyncClient, path: Path) -> Scene:
    """ASYNC-5: messages and events arrive once and in order, the turn after a job too."""
    run = await pawl.start(f"in the background: call hold_once with {json.dumps({'path': str(path)})}")
    numbers: list[int] = []
    events: dict[str, list[int]] = {}
    jobs: dict[str, int] = {}

    async def follow() -> None:
        async with aclosing(pawl.follow(run.conversation_id)) as changes:
            async for change in changes:
                numbers.extend(item.message.number for item in change.items if item.HasField("message"))
                jobs.update({item.job.job_id: item.job.state for item in change.items if item.HasField("job")})
                for event in change.events:
                    events.setdefault(event.run_id, []).append(event.seq)
                if any(item.run.generation and item.run.HasField("end_time") for item in change.items):
                    return

    following = asyncio.create_task(follow())
    await is_held(path)
    yield
    release(path)
    await asyncio.wait_for(following, PATIENCE_SECONDS)
    assert numbers == [message.number async for message in pawl.messages(run.conversation_id)]
    assert list(jobs.values()) == [COMPLETED]
    for seqs in events.values():
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


async def acknowledged_starts_are_kept(agent: Agent) -> Scene:
    """I1, I2: each start is repeated with its id until it is acknowledged, and each id creates one run."""

    async def start(number: int) -> str:
        while True:
            try:
                return (await agent.start(f"what is {number} * 2?", request_id=f"survivor-{number}")).run_id
            except grpc.aio.AioRpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}:
                    raise
                await asyncio.sleep(0.1)

    starting = [asyncio.create_task(start(number)) for number in range(1, 11)]
    yield
    run_ids = await asyncio.gather(*starting)
    assert len(set(run_ids)) == len(run_ids)
    for number, run_id in enumerate(run_ids, start=1):
        assert str(number * 2) in (await agent.until_ended(run_id)).output_text
        assert await start(number) == run_id


async def stream_continues(agent: Agent) -> Scene:
    run = await agent.start("count to 30 slowly, then what is 6 * 7")
    await _seen(agent, run.run_id, "2")
    yield
    assert (await agent.whole_log(run.run_id))[-1].type == "run.completed"
    assert "42" in (await agent.get(run.run_id)).output_text
