"""Runs that do calls of runs, through the real services, also when one of them dies in the middle (TOOL-7)."""

from __future__ import annotations

import json

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.system.suite.client import Agent
from tests.system.suite.test_crash import owner

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def child_of(agent: Agent, run_id: str) -> str:
    """Wait until a run does a call of the run; return its id."""
    await agent.until(run_id, lambda run: run_pb2.WAIT_KIND_AGENT in run.waits)
    return next(call.child_run_id for call in await agent.calls(run_id) if call.child_run_id)


async def test_an_approval_of_an_agent_is_seen_at_the_top_and_given_from_the_inbox(agent: Agent) -> None:
    run = await agent.start("ask an agent to e-mail ann@example.com about lunch: at noon")
    seen = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    waits = [run_pb2.WAIT_KIND_APPROVAL, run_pb2.WAIT_KIND_AGENT]
    await agent.until(run.run_id, lambda top: list(top.waits) == waits)
    child_run_id = await child_of(agent, run.run_id)
    pending = await agent.stub.ListPending(agent_pb2.ListPendingRequest(), metadata=agent.metadata)
    (call,) = [each for each in pending.calls if each.call_id == seen.call_id]

    assert (call.run_id, call.tool_name) == (child_run_id, "send_email")
    await agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
    ended, child = await agent.until_ended(run.run_id), await agent.until_ended(child_run_id)

    assert (ended.state, child.state) == (run_pb2.RUN_STATE_COMPLETED,) * 2
    assert (child.parent_run_id, child.depth, child.user_id) == (run.run_id, 1, ended.user_id)
    (delegated,) = await agent.calls(run.run_id)
    assert json.loads(delegated.result.content_json) == {"answer": child.output_text}
    assert ended.usage.model_calls > child.usage.model_calls > 0
    changed = [event.call_changed.call for event in await agent.events(run.run_id) if event.type == "tool.delegated"]
    assert [each.child_run_id for each in changed] == [child_run_id]


async def test_agents_start_agents_down_to_the_limit(agent: Agent) -> None:
    run = await agent.start("ask an agent to ask an agent to ask an agent to work out 6 * 7")
    ended = await agent.until_ended(run.run_id)
    page = await agent.stub.ListRuns(agent_pb2.ListRunsRequest(page_size=10), metadata=agent.metadata)
    below = {each.parent_run_id: each for each in page.runs}
    middle = below[run.run_id]
    last = below[middle.run_id]

    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert last.depth == 2
    assert last.run_id not in below
    assert "not offered" in last.output_text
    assert "not offered" in ended.output_text


async def test_cancelling_a_run_cancels_what_its_agent_waits_for(agent: Agent) -> None:
    run = await agent.start("ask an agent to ask an agent to e-mail ann@example.com about lunch: at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)

    ended = await agent.cancel(run.run_id)
    lowest = await agent.until_ended(call.run_id)
    middle = await agent.until_ended(lowest.parent_run_id)

    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    assert ended.stop_cause == run_pb2.STOP_CAUSE_USER
    assert [each.stop_cause for each in (middle, lowest)] == [run_pb2.STOP_CAUSE_PARENT] * 2
    (given_up,) = await agent.calls(run.run_id)
    assert given_up.state == call_pb2.CALL_STATE_CANCELLED
    pending = await agent.stub.ListPending(agent_pb2.ListPendingRequest(), metadata=agent.metadata)
    assert call.call_id not in [each.call_id for each in pending.calls]


async def test_a_run_hears_of_its_agent_though_the_worker_is_killed(suite: Suite) -> None:
    """I1, I3: kill -9 of agent-loop while the run below streams."""
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc) as agent:
        run = await agent.start("ask an agent to count to 200 slowly")
        child_run_id = await child_of(agent, run.run_id)
        async for event in agent.watch(child_run_id):
            if "3" in event.output_delta.text:
                break
        killed = await owner(suite)
    async with Agent(suite.endpoints.services["agent-loop"][1 - killed].grpc) as survivor:
        suite.kill("agent-loop", killed)
        ended = await survivor.until_ended(run.run_id)
        child = await survivor.get(child_run_id)
        (call,) = await survivor.calls(run.run_id)
    await suite.wait_ready("agent-loop", killed)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert child.epoch > 1
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    assert child.output_text.endswith("200")
    assert "200" in ended.output_text
