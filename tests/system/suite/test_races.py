"""Many at once: one of them counts, the others are told, and every run ends once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path

import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from tests.poll import until
from tests.system.suite import refusals
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _cancel(agent: Agent, run_id: str) -> run_pb2.Run:
    request = agent_pb2.CancelRunRequest(run_id=run_id)
    return (await agent.stub.CancelRun(request, metadata=agent.metadata)).run


async def test_many_starts_with_one_request_id_give_one_run(agent: Agent, other_agent: Agent) -> None:
    """I2"""
    starts = ((agent, other_agent)[n % 2].start("what is 2 * 3?", request_id="one-of-20") for n in range(20))
    assert len({run.run_id for run in await asyncio.gather(*starts)}) == 1


async def test_a_cancel_and_the_end_of_a_run_or_its_call_agree(agent: Agent, other_agent: Agent) -> None:
    """EVT-4, I12: whatever comes first holds; a call that is approved meanwhile runs once or never."""

    async def last_step(number: int) -> None:
        run = await agent.start("hello")
        await agent.until(run.run_id, lambda seen: seen.last_seq > number or seen.state >= 10)
        shown = await _cancel(other_agent, run.run_id)
        await agent.whole_log(run.run_id)
        wanted = run_pb2.RUN_STATE_CANCELLED if shown.state == run_pb2.RUN_STATE_CANCELLING else shown.state
        assert (await agent.get(run.run_id)).state == wanted

    async def approval() -> None:
        run = await agent.start("e-mail lee@example.com about Race: Go")
        call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
        deciding = refusals.outcome(agent.decide(call, call_pb2.DECISION_KIND_APPROVE))
        decided, _ = await asyncio.gather(deciding, _cancel(other_agent, run.run_id))
        assert decided.reason in {"", "CALL_NOT_PENDING"}
        await agent.whole_log(run.run_id)
        (settled,) = await agent.calls(run.run_id)
        assert (await agent.get(run.run_id)).state == run_pb2.RUN_STATE_CANCELLED
        assert settled.HasField("result")
        assert not decided.reason or settled.state == call_pb2.CALL_STATE_CANCELLED

    await asyncio.gather(*(last_step(number) for number in range(6)), *(approval() for _ in range(4)))


async def test_messages_of_every_policy_at_once_are_all_kept(agent: Agent, other_agent: Agent) -> None:
    """LOOP-13, I1: each is in the conversation once, in a run that ended."""
    run = await agent.start("count to 60 slowly")
    policies = (types_pb2.MESSAGE_POLICY_QUEUE, types_pb2.MESSAGE_POLICY_STEER, types_pb2.MESSAGE_POLICY_INTERRUPT)

    async def send(number: int) -> str:
        request = agent_pb2.SendMessageRequest(
            conversation_id=run.conversation_id, text=f"what is {number} * 2?", policy=policies[number % 3]
        )
        client = (agent, other_agent)[number % 2]
        return (await client.stub.SendMessage(request, metadata=client.metadata)).run.run_id

    for run_id in {*await asyncio.gather(*(send(number) for number in range(12))), run.run_id}:
        await agent.whole_log(run_id)
    request = agent_pb2.ListMessagesRequest(conversation_id=run.conversation_id, page_size=200)
    kept = (await agent.stub.ListMessages(request, metadata=agent.metadata)).messages
    texts = Counter(message.text for message in kept)
    assert [texts[f"what is {number} * 2?"] for number in range(12)] == [1] * 12


async def test_a_cancel_stops_a_slow_tool(agent: Agent, effects: Path) -> None:
    """LOOP-6: the run ends before the tool would have, and the conversation goes on."""
    run = await agent.start(f"call hold_once with {json.dumps({'path': str(effects)})}")

    async def happened() -> bool:
        return effects.with_suffix(".held").exists()

    await until(happened)
    assert (await agent.cancel(run.run_id)).state == run_pb2.RUN_STATE_CANCELLED
    (call,) = await agent.calls(run.run_id)
    assert call.state == call_pb2.CALL_STATE_CANCELLED
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    assert "42" in (await agent.until_ended(after.run_id)).output_text


async def test_watchers_of_a_live_run_that_come_and_go_see_one_sequence(agent: Agent, other_agent: Agent) -> None:
    """EVT-1, I7: each disconnects after every few events and resumes at either replica."""
    run = await agent.start("count to 30 slowly")

    async def watch_in_pieces(length: int) -> list[event_pb2.RunEvent]:
        seen: list[event_pb2.RunEvent] = []
        while not seen or seen[-1].type != "run.completed":
            watcher, count = (agent, other_agent)[len(seen) % 2], 0
            events = watcher.watch(run.run_id, after_seq=seen[-1].seq if seen else 0)
            async with contextlib.aclosing(events):
                async for event in events:
                    seen.append(event)
                    count += 1
                    if count == length:
                        break
        return seen

    seen = await asyncio.gather(*map(watch_in_pieces, (1, 3, 8)))
    assert seen == [await agent.whole_log(run.run_id)] * 3


async def test_a_foreign_run_is_the_same_as_an_absent_one(agent: Agent) -> None:
    """I13: another user and another store get the very answer that an absent id gets."""
    run = await agent.start("what is 4 * 4?")

    async def refusal(run_id: str, store: str, user: str) -> refusals.Refusal:
        request = agent_pb2.GetRunRequest(run_id=run_id)
        return await refusals.outcome(agent.stub.GetRun(request, metadata=(("pawl-store", store), ("pawl-user", user))))

    absent = await refusal("run_absent", "local", "me")
    assert absent.reason == "RUN_NOT_FOUND"
    assert await refusal(run.run_id, "local", "somebody") == absent == await refusal(run.run_id, "elsewhere", "me")
