"""An MCP server asks the user in the middle of a call, through the whole suite."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pawl.agent.v1 import types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import source_pb2, source_pb2_grpc
from tests.fakes.mcp_program import stdio_config
from tests.keys import keyed_channel
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIZES = {
    "message": "Which size?",
    "requestedSchema": {
        "type": "object",
        "properties": {"size": {"type": "string", "enum": ["s", "m"], "enumNames": ["Small", "Medium"]}},
    },
}


def prompt(source: str) -> str:
    """What makes the scripted model call the tool."""
    return f"call {source}__ask with {json.dumps({'asks': SIZES})}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sources(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    """The server twice: as `once`, whose calls must not be repeated, and as `again`, whose calls may be."""
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        stub = source_pb2_grpc.SourceServiceStub(channel)
        effects = {"once": call_pb2.EFFECT_CLASS_AT_MOST_ONCE, "again": call_pb2.EFFECT_CLASS_READ_ONLY}
        for name, effect in effects.items():
            folder = tmp_path_factory.mktemp(name)
            tool = {"name": "ask", "description": "Asks.", "inputSchema": {"type": "object"}}
            (folder / "tools.json").write_text(json.dumps([tool]))
            policy = source_pb2.SourceToolPolicy(
                tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE, effect_class=effect
            )
            config = source_pb2.SourceConfig(name=name, mcp_stdio=stdio_config(folder), policies=[policy])
            await stub.AddSource(source_pb2.AddSourceRequest(config=config))
        yield
        for name in effects:
            await stub.RemoveSource(source_pb2.RemoveSourceRequest(name=name))


async def ended(agent: Agent, run_id: str) -> Any:
    """What the server got of the user."""
    run = await agent.until_ended(run_id)
    (done,) = await agent.calls(run_id)
    assert (run.state, done.state) == (run_pb2.RUN_STATE_COMPLETED, call_pb2.CALL_STATE_SUCCEEDED)
    return json.loads(json.loads(done.result.content_json))


@pytest.mark.parametrize("source", ["once", "again"])
async def test_the_question_of_a_server_reaches_the_user_and_the_answer_the_server(
    agent: Agent, sources: None, source: str
) -> None:
    run = await agent.start(prompt(source))
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    assert call.question.question == "Which size?"
    assert list(call.question.options) == ["Small", "Medium"]
    assert f"{source}.ask" in call.question.why
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Medium")
    assert await ended(agent, run.run_id) == {"action": "accept", "content": {"size": "m"}}


@pytest.mark.parametrize("source", ["once", "again"])
async def test_an_answer_that_does_not_fit_is_refused_when_it_is_given(
    agent: Agent, sources: None, source: str
) -> None:
    run = await agent.start(prompt(source))
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="enormous")
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "the answer does not fit: it must be one of Small, Medium"
    async with agent.session() as session:
        decision = types_pb2.CallDecision(
            run_id=run.run_id, call_id=call.call_id, kind=call_pb2.DECISION_KIND_ANSWER, answer="enormous"
        )
        receipt = await session.receipt(decision=decision)
    assert (receipt.status, receipt.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_ARGUMENTS")
    (open_call,) = (await agent.get(run.run_id)).pending_calls
    assert open_call.question.question == "Which size?", "the question is still open, as it was"
    await agent.decide(open_call, call_pb2.DECISION_KIND_ANSWER, answer="s")
    assert await ended(agent, run.run_id) == {"action": "accept", "content": {"size": "s"}}


async def test_a_question_that_nobody_answers_is_declined(agent: Agent, sources: None) -> None:
    options = run_pb2.RunOptions(limits=run_pb2.RunLimits(answer_timeout_seconds=0.3))
    run = await agent.start(prompt("once"), options=options)
    assert await ended(agent, run.run_id) == {"action": "decline"}
