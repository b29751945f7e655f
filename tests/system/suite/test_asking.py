"""A tool asks its user in the middle of a call, through the whole suite."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.system.suite.client import ENDED, Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def asked(agent: Agent, tool: str, path: Path) -> call_pb2.Call:
    """Start a run whose tool asks; returns the call that waits."""
    run = await agent.start(f"call {tool} with {json.dumps({'path': str(path)})}")
    return await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)


@pytest.mark.parametrize("tool", ["order_once", "order_again"])
async def test_the_answer_goes_back_into_the_tool(agent: Agent, tmp_path: Path, tool: str) -> None:
    call = await asked(agent, tool, tmp_path / "orders")
    assert call.question.question == "Which colour?"
    assert list(call.question.options) == ["red", "blue"]
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="red")
    waiting = await agent.until(
        call.run_id, lambda run: any(each.question.question == "Which size?" for each in run.pending_calls)
    )
    (size,) = waiting.pending_calls
    assert (size.call_id, size.state) == (call.call_id, call_pb2.CALL_STATE_ASKED)
    await agent.decide(size, call_pb2.DECISION_KIND_ANSWER, answer="large")
    ended = await agent.until_ended(call.run_id)
    (done,) = await agent.calls(call.run_id)
    assert (ended.state, done.state) == (run_pb2.RUN_STATE_COMPLETED, call_pb2.CALL_STATE_SUCCEEDED)
    assert done.result.content_json == b'"red large"'
    assert (tmp_path / "orders").read_text() == "red large\n"


async def test_who_does_not_answer_leaves_it_to_the_tool(agent: Agent, tmp_path: Path) -> None:
    call = await asked(agent, "order_once", tmp_path / "orders")
    await agent.decide(call, call_pb2.DECISION_KIND_REJECT, reason="no idea")
    await agent.until_ended(call.run_id)
    (done,) = await agent.calls(call.run_id)
    assert (done.state, done.result.error_reason) == (call_pb2.CALL_STATE_FAILED, "TOOL_ERROR")
    assert not (tmp_path / "orders").exists()


async def test_a_question_of_a_tool_expires_for_the_tool(agent: Agent, tmp_path: Path) -> None:
    options = run_pb2.RunOptions(limits=run_pb2.RunLimits(answer_timeout_seconds=0.3))
    prompt = f"call order_once with {json.dumps({'path': str(tmp_path / 'orders')})}"
    run = await agent.start(prompt, options=options)
    await agent.until_ended(run.run_id)
    (done,) = await agent.calls(run.run_id)
    assert (done.state, done.result.error_reason) == (call_pb2.CALL_STATE_FAILED, "TOOL_ERROR")


async def test_a_cancelled_run_stops_the_tool_that_asks(agent: Agent, tmp_path: Path) -> None:
    call = await asked(agent, "order_once", tmp_path / "orders")
    ended = await agent.cancel(call.run_id)
    assert ended.state == run_pb2.RUN_STATE_CANCELLED
    assert not ended.unstopped_call_ids
    with pytest.raises(grpc.aio.AioRpcError):
        await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="red")
    assert not (tmp_path / "orders").exists()


async def test_nobody_else_answers_and_a_second_answer_is_late(agent: Agent, suite: Suite, tmp_path: Path) -> None:
    call = await asked(agent, "order_once", tmp_path / "orders")
    async with Agent(suite.endpoints.services["agent-loop"][0].grpc, user="somebody-else") as other:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="blue")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="red")
    await agent.until(
        call.run_id,
        lambda run: run.state in ENDED or any(c.question.question == "Which size?" for c in run.pending_calls),
    )
    await agent.cancel(call.run_id)
