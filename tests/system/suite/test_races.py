"""Many at once: one of them is taken, the others are told, and every run ends once."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from datetime import UTC
from pathlib import Path

import pytest

from pawl.agent.v1 import agent_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.poll import until
from tests.system.suite import refusals
from tests.system.suite.client import Agent
from tests.system.suite.test_crash import owner

pytestmark = pytest.mark.asyncio(loop_scope="session")

ENDINGS = {"run.completed", "run.failed", "run.cancelled", "run.expired"}


async def _ended(agent: Agent, run_id: str) -> run_pb2.Run:
    """Return the run after its end, which its log must tell once, last and without gaps (EVT-1, EVT-4)."""
    run = await agent.until_ended(run_id)
    events = await agent.events(run_id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [event.type for event in events if event.type in ENDINGS] == [events[-1].type]
    return run


async def _decide(
    agent: Agent, call: call_pb2.Call, kind: call_pb2.DecisionKind.ValueType, **fields: str
) -> refusals.Refusal:
    return await refusals.outcome(agent.decide(call, kind, **fields))


async def _cancel(agent: Agent, run_id: str) -> run_pb2.Run:
    request = agent_pb2.CancelRunRequest(run_id=run_id)
    return (await agent.stub.CancelRun(request, metadata=agent.metadata)).run


async def test_of_30_decisions_at_once_one_is_taken(suite: Suite, agent: Agent, other_agent: Agent) -> None:
    """HITL-3, I9"""
    outbox = suite.folder.path / "outbox"
    before = set(outbox.glob("**/*.eml"))
    run = await agent.start("e-mail kim@example.com about Lunch: See you at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    kinds = (call_pb2.DECISION_KIND_APPROVE, call_pb2.DECISION_KIND_REJECT)
    outcomes = await asyncio.gather(
        *(_decide((agent, other_agent)[n % 2], call, kinds[n % 3 == 0], request_id=f"race-{n}") for n in range(30))
    )
    reasons = Counter(outcome.reason for outcome in outcomes)
    assert reasons == {"": 1, "ALREADY_DECIDED": 29}
    assert (await _ended(agent, run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (settled,) = await agent.calls(run.run_id)
    sent = settled.state == call_pb2.CALL_STATE_SUCCEEDED
    assert len(set(outbox.glob("**/*.eml")) - before) == sent


async def test_30_starts_with_one_request_id_give_one_run(agent: Agent, other_agent: Agent) -> None:
    """I2"""
    starts = ((agent, other_agent)[n % 2].start("what is 2 * 3?", request_id="one-of-30") for n in range(30))
    assert len({run.run_id for run in await asyncio.gather(*starts)}) == 1


async def test_a_cancel_and_the_last_step_agree_on_how_the_run_ended(agent: Agent, other_agent: Agent) -> None:
    """EVT-4, C5: whatever comes first holds, and the cancel says which."""

    async def race(number: int) -> None:
        run = await agent.start("hello")
        await agent.until(run.run_id, lambda seen: seen.last_seq > number % 8 or seen.state >= 10)
        shown = await _cancel(other_agent, run.run_id)
        ended = await _ended(agent, run.run_id)
        wanted = run_pb2.RUN_STATE_CANCELLED if shown.state == run_pb2.RUN_STATE_CANCELLING else shown.state
        assert ended.state == wanted

    await asyncio.gather(*(race(number) for number in range(16)))


async def test_an_approval_and_a_cancel_at_once_run_the_call_once_or_never(agent: Agent, other_agent: Agent) -> None:
    """I12: after the cancel nothing new starts."""

    async def race() -> None:
        run = await agent.start("e-mail lee@example.com about Race: Go")
        call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
        decided, _ = await asyncio.gather(
            _decide(agent, call, call_pb2.DECISION_KIND_APPROVE), _cancel(other_agent, run.run_id)
        )
        assert decided.reason in {"", "CALL_NOT_PENDING"}
        assert (await _ended(agent, run.run_id)).state == run_pb2.RUN_STATE_CANCELLED
        (settled,) = await agent.calls(run.run_id)
        assert settled.HasField("result")
        if decided.reason:
            assert settled.state == call_pb2.CALL_STATE_CANCELLED

    await asyncio.gather(*(race() for _ in range(8)))


async def test_an_answer_at_the_deadline_is_taken_or_too_late(agent: Agent) -> None:
    """HITL-4: the receipt is true."""

    async def race(number: int) -> None:
        limits = run_pb2.RunLimits(answer_timeout_seconds=15)
        run = await agent.start("book a table", options=run_pb2.RunOptions(limits=limits))
        call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
        left_seconds = call.deadline_time.ToDatetime(tzinfo=UTC).timestamp() - time.time()
        await asyncio.sleep(left_seconds + (number - 4) * 0.02)
        decided = await _decide(agent, call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight")
        assert (await _ended(agent, run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
        (settled,) = await agent.calls(run.run_id)
        if decided.reason:
            assert decided.reason in {"DEADLINE_PASSED", "CALL_NOT_PENDING"}
            assert settled.state == call_pb2.CALL_STATE_EXPIRED
        else:
            assert settled.state == call_pb2.CALL_STATE_SUCCEEDED

    await asyncio.gather(*(race(number) for number in range(8)))


async def test_100_messages_wait_in_a_conversation_and_run_in_order(agent: Agent, other_agent: Agent) -> None:
    """LOOP-13"""
    first = await agent.start("book a table")
    question = await agent.until_pending(first.run_id, call_pb2.CALL_STATE_ASKED)
    waiting = [
        await (agent, other_agent)[n % 2].start(f"what is {n} * 1?", conversation_id=first.conversation_id)
        for n in range(100)
    ]
    full = await refusals.outcome(agent.start("one more", conversation_id=first.conversation_id))
    assert full.reason == "QUEUE_FULL"
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="Tonight")
    ended = [await agent.until_ended(run.run_id) for run in waiting]
    assert {run.state for run in ended} == {run_pb2.RUN_STATE_COMPLETED}
    starts = [run.start_time.ToNanoseconds() for run in ended]
    ends = [run.end_time.ToNanoseconds() for run in ended]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


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

    run_ids = set(await asyncio.gather(*(send(number) for number in range(24)))) | {run.run_id}
    for run_id in run_ids:
        await _ended(agent, run_id)
    request = agent_pb2.ListMessagesRequest(conversation_id=run.conversation_id, page_size=200)
    kept = (await agent.stub.ListMessages(request, metadata=agent.metadata)).messages
    texts = Counter(message.text for message in kept)
    assert [texts[f"what is {number} * 2?"] for number in range(24)] == [1] * 24


async def test_a_cancel_stops_a_slow_tool(agent: Agent, tmp_path: Path) -> None:
    """LOOP-6, C11: the run ends before the tool would have, and the conversation goes on."""
    effects = tmp_path / "effects"
    arguments = json.dumps({"path": str(effects), "seconds": 600})
    run = await agent.start(f"call act_once with {arguments}")

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())  # not between its opening and its writing

    await until(happened)
    await _cancel(agent, run.run_id)
    ended = await _ended(agent, run.run_id)
    (call,) = await agent.calls(run.run_id)
    assert (ended.state, call.state) == (run_pb2.RUN_STATE_CANCELLED, call_pb2.CALL_STATE_CANCELLED)
    after = await agent.start("what is 6 * 7?", conversation_id=run.conversation_id)
    assert "42" in (await _ended(agent, after.run_id)).output_text


async def test_a_stopped_owner_that_wakes_up_after_its_lease_changes_nothing(suite: Suite, tmp_path: Path) -> None:
    """I4, I5: one ending, one effect, no event of the old epoch after one of the new."""
    effects = tmp_path / "effects"
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        run = await agent.start(f"call act_once with {json.dumps({'path': str(effects), 'seconds': 8})}")

    async def happened() -> bool:
        return effects.exists() and bool(effects.read_text())  # not between its opening and its writing

    await until(happened)
    stopped = await owner(suite)
    async with Agent(suite.endpoints.services["agent-loop"][1 - stopped].grpc) as agent:
        suite.kill("agent-loop", stopped, signal.SIGSTOP)
        try:
            await agent.until(run.run_id, lambda seen: seen.epoch > 1)
        finally:
            suite.kill("agent-loop", stopped, signal.SIGCONT)
        ended = await _ended(agent, run.run_id)
        epochs = [event.attempt for event in await agent.events(run.run_id)]
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert epochs == sorted(epochs)
    assert effects.read_text() == "done\n"
