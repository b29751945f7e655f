"""Scenes that a disaster interrupts: each stops once it may come, and then says what became of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import asyncpg
import grpc
import httpx2

from pawl.agent.v1 import agent_pb2, operator_pb2, operator_pb2_grpc, undo_pb2
from pawl.client import AsyncClient, approve
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.event.v1.schedule_pb2 import SCHEDULE_FIRE_OUTCOME_STARTED, SCHEDULE_OVERLAP_ALLOW, ScheduleDefinition
from pawl.launcher.suite import Suite
from pawl.notify.v1.notify_pb2 import ListNotificationsRequest
from pawl.tools import Category, EffectClass, ToolContext, tool
from tests.poll import until
from tests.system.suite.client import PATIENCE_SECONDS, Agent
from tests.system.talk import Talk

Scene: TypeAlias = AsyncGenerator[None, None]

COMPLETED: Final = run_pb2.RUN_STATE_COMPLETED
ASK_OPERATOR: Final = run_pb2.RunOptions(unknown_outcome_policy=run_pb2.UNKNOWN_OUTCOME_POLICY_NEEDS_ATTENTION)
_BEAT_SECONDS: Final = 4
"""Of a schedule: it keeps its last twenty fires, and these must be seen."""


async def start_held(agent: Agent, tool: str, path: Path, **options: Any) -> str:
    """Start a run that calls a tool which waits for the test; returns once it waits."""
    run = await agent.start(f"call {tool} with {json.dumps({'path': str(path)})}", **options)
    await is_held(path)
    return run.run_id


async def is_held(path: Path) -> None:
    async def waits() -> bool:
        return path.with_suffix(".held").exists()

    await until(waits)


def release(path: Path) -> None:
    path.with_suffix(".go").touch()


def shown(events: Sequence[event_pb2.RunEvent]) -> str:
    """The text on the screen of a watcher that drops voided output."""
    pieces: list[tuple[int, str]] = []
    for event in events:
        void_from = event.round_retrying.void_from_seq
        if void_from:
            pieces = [piece for piece in pieces if piece[0] < void_from]
        if event.output_delta.text:
            pieces.append((event.seq, event.output_delta.text))
    return "".join(text for _, text in pieces)


async def _seen(agent: Agent, run_id: str, text: str) -> None:
    """Watch until the model has written some text."""
    async for event in agent.watch(run_id):
        if text in event.output_delta.text:
            return
    raise AssertionError("the run ended first")


async def a_stream_is_told_whole_and_once(agent: Agent, pawl: AsyncClient) -> Scene:
    """I1, I3, EVT-1, EVT-2, OPS-4: to a watcher, to a client of text, and to a front end that is told it was lost."""
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
    """I5: the registry finishes what it began, and the next owner gets that result."""
    run_id = await start_held(agent, "hold_once", path)
    yield
    release(path)
    await agent.whole_log(run_id)
    (call,) = await agent.calls(run_id)
    assert (call.state, call.result.content_json) == (call_pb2.CALL_STATE_SUCCEEDED, b'"finished"')
    assert path.read_text() == "done\n"


async def a_run_hears_of_its_agent(agent: Agent, path: Path) -> Scene:
    """I1, I3, TOOL-7."""
    task = f"call hold_once with {json.dumps({'path': str(path)})}"
    run = await agent.start(f"call run_agent with {json.dumps({'task': task})}")
    await is_held(path)
    yield
    release(path)
    assert (await agent.until_ended(run.run_id)).state == COMPLETED
    (call,) = await agent.calls(run.run_id)
    child = await agent.get(call.child_run_id)
    assert (call.state, child.state) == (call_pb2.CALL_STATE_SUCCEEDED, COMPLETED)
    assert (child.parent_run_id, child.depth) == (run.run_id, 1)
    assert json.loads(call.result.content_json) == {"answer": child.output_text}
    assert path.read_text() == "done\n"


async def an_undo_takes_nothing_back_twice(agent: Agent, path: Path) -> Scene:
    """HITL-7: in reverse order, across a question."""
    lines = [
        f"call put_line with {json.dumps({'path': str(path), 'line': line, 'holds': True})}" for line in ("one", "two")
    ]
    run = await agent.start(f"{lines[0]} then ask me which colour then {lines[1]}")
    question = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="blue")
    await agent.until_ended(run.run_id)
    assert path.read_text() == "one\ntwo\n"
    undoing = (await agent.stub.UndoRun(undo_pb2.UndoRunRequest(run_id=run.run_id), metadata=agent.metadata)).run
    await is_held(path)
    yield
    release(path)
    ended = await agent.until_ended(undoing.run_id)
    assert (ended.state, ended.usage.model_calls) == (COMPLETED, 0)
    assert [call.state for call in await agent.calls(undoing.run_id)] == [call_pb2.CALL_STATE_SUCCEEDED] * 2
    assert path.read_text() == "", "an inverse fails unless its line is the last one"
    request = undo_pb2.GetUndoReportRequest(run_id=undoing.run_id)
    report = (await agent.stub.GetUndoReport(request, metadata=agent.metadata)).calls
    states = {call.tool_name: undo_pb2.UndoState.Name(call.state) for call in report}
    assert states == {"put_line": "UNDO_STATE_UNDONE", "ask_user": "UNDO_STATE_NOTHING_TO_UNDO"}


async def a_call_of_a_front_end_ends_once(pawl: AsyncClient) -> Scene:
    """FE-2, I23: with a tool of its own, at the client that has it and at no other."""
    begun, goes_on, drawn = asyncio.Event(), asyncio.Event(), []

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def draw(title: str, context: ToolContext) -> dict[str, str]:
        """Draw something."""
        begun.set()
        await goes_on.wait()
        drawn.append(title)
        return {"drawn_for": context.user_id}

    async with pawl.session(tools=[draw]) as session, pawl.session() as idle:
        run_id = await session.start('call draw with {"title": "Plan"}')
        await idle.attach(run_id)
        async with asyncio.timeout(240):
            await begun.wait()
        yield
        goes_on.set()
        assert (await pawl.result(run_id)).state == COMPLETED
        (call,) = [call async for call in pawl.calls(run_id)]
        assert (call.state, drawn) == (call_pb2.CALL_STATE_SUCCEEDED, ["Plan"])
        assert call.result.content_json == b'{"drawn_for":"me"}'


async def a_decision_is_taken_once(pawl: AsyncClient) -> Scene:
    """HITL-2, I2: the replicas die at the moment of the decision."""
    run = await pawl.start("e-mail kim@example.com about Lunch: See you at noon")
    (call,) = (await pawl.get(run.run_id, wait_seconds=60)).pending_calls
    yield
    await pawl.decide(approve(call))
    assert (await pawl.result(run.run_id)).state == COMPLETED
    (settled,) = [each async for each in pawl.calls(run.run_id)]
    assert settled.state == call_pb2.CALL_STATE_SUCCEEDED


async def a_series_keeps_its_beat(pawl: AsyncClient) -> Scene:
    """ASYNC-3, ASYNC-6: no time has two iterations, and what was stopped never succeeds."""
    talk = Talk(pawl)
    (ends,) = await talk.jobs(await talk.say("in the background every 1 seconds 4 times: what is 6 * 7"))
    (stopped,) = await talk.jobs(await talk.say("in the background every 1 seconds 500 times: what is 5 * 5"))
    await talk.job(ends, lambda job: job.round >= 1)
    yield
    await pawl.cancel(stopped)
    assert (await talk.ended(stopped)).state == run_pb2.RUN_STATE_CANCELLED
    job = await talk.ended(ends)
    assert (job.state, job.round) == (COMPLETED, 4)
    begin = job.job.begin_time.ToNanoseconds()
    beats = [(call.create_time.ToNanoseconds() - begin) // 10**9 async for call in pawl.calls(ends)]
    assert beats == sorted(set(beats)), "a time has at most one iteration"
    states = {notice["job_id"]: notice["state"] for notice in await talk.end_told(ends, stopped)}
    assert (states[ends], states[stopped]) == ("COMPLETED", "CANCELLED")


async def an_unknown_outcome_is_told_to_the_model(agent: Agent, path: Path) -> Scene:
    """I5: an at-most-once effect is not repeated and not guessed at."""
    run_id = await start_held(agent, "hold_once", path)
    yield
    assert (await agent.whole_log(run_id))[-1].type == "run.completed"
    (call,) = await agent.calls(run_id)
    assert (call.state, call.result.is_error) == (call_pb2.CALL_STATE_OUTCOME_UNKNOWN, True), call
    assert path.read_text() == "done\n"


async def an_operator_says_what_happened(
    agent: Agent, path: Path, resolution: str, content: str, effects: str
) -> Scene:
    """I5: it is not repeated unless somebody says that it did not happen; the operator is another user."""
    run_id = await start_held(agent, "hold_once", path, options=ASK_OPERATOR)
    yield
    release(path)
    found = await agent.until(run_id, lambda run: run.state == run_pb2.RUN_STATE_NEEDS_ATTENTION)
    assert found.attention.reason == run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME
    (doubted,) = found.pending_calls
    operators = operator_pb2_grpc.OperatorServiceStub(agent.channel)
    page = await operators.ListAttention(operator_pb2.ListAttentionRequest(), metadata=agent.metadata)
    assert run_id in [run.run_id for run in page.runs]
    request = agent_pb2.ResolveCallRequest(
        run_id=run_id,
        call_id=doubted.call_id,
        resolution=agent_pb2.Resolution.Value(resolution),
        content_json=content.encode() if resolution == "RESOLUTION_HAPPENED" else b"",
    )
    await agent.stub.ResolveCall(request, metadata=(("pawl-user", "helper"),))
    assert (await agent.until_ended(run_id)).state == COMPLETED
    (call,) = await agent.calls(run_id)
    assert content in call.result.content_json.decode()
    assert path.read_text() == effects
    events = await agent.events(run_id)
    (acted,) = [event.operator_acted for event in events if event.HasField("operator_acted")]
    assert (acted.user_id, acted.act, acted.call_id) == ("helper", event_pb2.OPERATOR_ACT_RESOLVED, doubted.call_id)


async def a_read_is_made_again(agent: Agent, path: Path) -> Scene:
    """I5"""
    run_id = await start_held(agent, "hold_again", path)
    yield
    release(path)
    await agent.whole_log(run_id)
    (call,) = await agent.calls(run_id)
    assert (call.state, path.read_text()) == (call_pb2.CALL_STATE_SUCCEEDED, "done\ndone\n")


async def a_tool_resumes_from_its_checkpoint(agent: Agent, path: Path) -> Scene:
    run_id = await start_held(agent, "count_up", path)
    yield
    release(path)
    await agent.whole_log(run_id)
    (call,) = await agent.calls(run_id)
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    assert path.read_text().split("\n")[:-1] == [f"step {number}" for number in range(5)]


async def acknowledged_starts_are_kept(agent: Agent) -> Scene:
    """I1, I2: each start is repeated with its id until it is acknowledged; each id gives one run."""

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


async def a_stream_goes_on(agent: Agent) -> Scene:
    run = await agent.start("count to 30 slowly, then what is 6 * 7")
    await _seen(agent, run.run_id, "2")
    yield
    assert (await agent.whole_log(run.run_id))[-1].type == "run.completed"
    assert "42" in (await agent.get(run.run_id)).output_text


async def each_due_time_of_a_schedule_has_one_run(suite: Suite, pawl: AsyncClient) -> Scene:
    """ASYNC-8, I14"""
    definition = ScheduleDefinition(
        name="tick",
        text="what is 6 * 7?",
        interval_seconds=_BEAT_SECONDS,
        overlap=SCHEDULE_OVERLAP_ALLOW,
        labels={"of": "tick"},
    )
    await pawl.create_schedule(definition)
    fires: dict[int, Any] = {}

    async def has_fired(count: int) -> bool:
        fires.update({fire.due_time.seconds: fire for fire in (await pawl.get_schedule("tick")).fires})
        return len(fires) >= count

    await until(lambda: has_fired(1))
    yield
    seen = len(fires)
    await until(lambda: has_fired(seen + 2))
    await pawl.pause_schedule("tick")
    await has_fired(0)
    await pawl.delete_schedule("tick")
    times = sorted(fires)
    assert times == list(range(times[0], times[-1] + 1, _BEAT_SECONDS)), "a due time is missing"
    assert {fire.outcome for fire in fires.values()} == {SCHEDULE_FIRE_OUTCOME_STARTED}
    database = await asyncpg.connect(suite.database_url)
    try:
        runs = await database.fetch("SELECT run_id FROM job_store.runs WHERE labels LIKE '%of=tick'")
    finally:
        await database.close()
    assert sorted(run["run_id"] for run in runs) == sorted(fire.run_id for fire in fires.values())


async def its_end_is_told_once(agent: Agent, pawl: AsyncClient) -> Scene:
    """NOTE-1"""
    run = await agent.start("book a table")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    yield
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight at 19:00")
    assert (await agent.until_ended(run.run_id)).state == COMPLETED

    async def told() -> list[str]:
        inbox = (await pawl.notifier.ListNotifications(ListNotificationsRequest(page_size=200))).notifications
        return [each.title for each in inbox if each.run_id == run.run_id and "completed" in each.title]

    async def is_told() -> bool:
        return bool(await told())

    await until(is_told)
    assert len(await told()) == 1


async def a_call_that_somebody_outside_completes_waits(pawl: AsyncClient, path: Path) -> Scene:
    """ASYNC-2: the first end that comes over HTTP counts, and the conversation is told."""
    talk = Talk(pawl)
    said = f"in the background: call print_poster with {json.dumps({'path': str(path)})}"
    (job_id,) = await talk.jobs(await talk.say(said))
    await talk.job(job_id, lambda job: run_pb2.WAIT_KIND_COMPLETION in job.waits)
    yield
    (url,) = path.read_text().splitlines()
    async with httpx2.AsyncClient(timeout=60.0) as shop:

        async def post(to: str, end: object) -> tuple[int, Any]:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (answer := await shop.post(to, json=end)).status_code >= httpx2.codes.INTERNAL_SERVER_ERROR:
                    await asyncio.sleep(0.1)
            return answer.status_code, answer.json()

        status, refused = await post(url[:-1], {"result": 1})
        assert (status, refused["details"][0]["debug"]["reason"]) == (404, "COMPLETION_NOT_FOUND")
        garbled: list[Any] = [{}, [], {"result": 1, "error": "x"}, {"error": ""}, {"result": "x" * 300_000}]
        for garbage in garbled:
            assert (await post(url, garbage))[0] >= 400, str(garbage)[:50]
        assert await post(url, {"result": {"pages": 3}}) == (200, {})
        assert await post(url, {"result": {"pages": 3}}) == (200, {"duplicate": True})
        status, refused = await post(url, {"error": "It burnt."})
        assert (status, refused["details"][0]["debug"]["reason"]) == (400, "CALL_NOT_PENDING")
    job = await talk.ended(job_id)
    assert (job.state, json.loads(job.output_text)) == (COMPLETED, {"pages": 3})
    (told,) = await talk.told(1)
    assert told["job_id"] == job_id
