"""Front-end calls through the whole suite: nobody runs them, or the process that holds one is killed (FE-2, FE-4)."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest
import pytest_asyncio

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import audit_pb2, tool_pb2, tool_pb2_grpc
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from tests.keys import LOCAL_KEY, keyed_channel
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOBODY_RUNS_IT = run_pb2.RunOptions(limits=run_pb2.RunLimits(offer_deadline_seconds=0.5))
HELD_TOO_LONG = run_pb2.RunOptions(limits=run_pb2.RunLimits(offer_deadline_seconds=8.0))

_HOLDER = """
import sys, time
import grpc
from pawl.agent.v1 import agent_pb2_grpc, session_pb2

def frames():
    hello = session_pb2.Hello(client_id="holder", tools=[session_pb2.ClientTool(name="show_panel")], calls_max=1)
    yield session_pb2.SessionRequest(frame_id="1", hello=hello)
    yield session_pb2.SessionRequest(frame_id="2", attach=session_pb2.Attach(run_id=sys.argv[2]))
    while True:
        time.sleep(5)
        yield session_pb2.SessionRequest(frame_id="", heartbeat=session_pb2.ClientHeartbeat())

stub = agent_pb2_grpc.AgentServiceStub(grpc.insecure_channel(sys.argv[1]))
for frame in stub.Session(frames(), metadata=(("authorization", f"Bearer {sys.argv[3]}"),)):
    if frame.HasField("offer"):
        print(frame.offer.offer_epoch, flush=True)
"""


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def forms(suite: Suite) -> None:
    """A front-end tool for each thing that can happen when nobody runs a call."""
    fallbacks = {
        "form_that_fails": (call_pb2.OFFER_FALLBACK_FAIL, ""),
        "form_or_calculate": (call_pb2.OFFER_FALLBACK_BACKEND_TOOL, "calculate"),
        "form_or_ask": (call_pb2.OFFER_FALLBACK_ASK_USER, ""),
    }
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        for name, (fallback, tool) in fallbacks.items():
            definition = tool_pb2.ToolDefinition(
                name=name,
                description="Lets the user fill in a form.",
                arguments_schema_json=b'{"type":"object","properties":{"expression":{"type":"string"}}}',
                context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
                category=call_pb2.TOOL_CATEGORY_SAFE,
                effect_class=call_pb2.EFFECT_CLASS_READ_ONLY,
                offer_fallback=fallback,
                fallback_tool_name=tool,
            )
            request = tool_pb2.RegisterToolRequest(definition=definition, replace=True)
            await tool_pb2_grpc.ToolServiceStub(channel).RegisterTool(request)


async def test_what_becomes_of_front_end_calls_is_counted(suite: Suite, agent: Agent) -> None:
    """TOOL-6: a result once, with who brought it; a call that a client holds until it expires as an error."""
    run = await agent.start('call form_that_fails with {"expression": "2 * 21"}')
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_OFFERED)
    await agent.submit(call, b"42")
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    async with agent.session("form_that_fails", client_id="idle") as idle:
        held = await agent.start('call form_that_fails with {"expression": "2 * 21"}', options=HELD_TOO_LONG)
        await idle.receipt(attach=session_pb2.Attach(run_id=held.run_id))
        await idle.next("offer")
        assert (await agent.until_ended(held.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        auditor = AuditServiceStub(channel)
        wanted = audit_pb2.ListAuditRequest(call_id=call.call_id, kind=audit_pb2.AUDIT_KIND_RETURNED)
        (entry,) = (await auditor.ListAudit(wanted)).entries
        asked = audit_pb2.GetToolAnalyticsRequest(tool_name="form_that_fails")
        (figures,) = (await auditor.GetToolAnalytics(asked)).tools
    assert (entry.verdict, entry.by_user_id, entry.result_bytes) == ("SUCCEEDED", run.user_id, 2)
    assert (figures.execution_count, figures.error_count) == (2, 1)
    assert figures.p50_seconds == 0.0 < figures.p95_seconds


async def test_a_call_that_nobody_ran_is_expired_and_a_later_result_is_late(agent: Agent) -> None:
    """FE-4, FE-5: the model is told, the run goes on."""
    run = await agent.start('call form_that_fails with {"expression": "2 * 21"}', options=NOBODY_RUNS_IT)
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (settled,) = await agent.calls(run.run_id)
    assert (settled.state, settled.result.is_error) == (call_pb2.CALL_STATE_EXPIRED, True)
    late = await agent.submit(settled, b"42")
    assert [receipt.status for receipt in late.receipts] == [types_pb2.RECEIPT_STATUS_LATE]
    assert (await agent.calls(run.run_id)) == [settled]


async def test_a_backend_tool_takes_the_place_of_a_call_that_nobody_ran(agent: Agent) -> None:
    """FE-4"""
    run = await agent.start('call form_or_calculate with {"expression": "2 * 21"}', options=NOBODY_RUNS_IT)
    await agent.until_ended(run.run_id)
    # The scripted model does not find the name of its tool in the history, and asks again.
    settled = (await agent.calls(run.run_id))[0]
    assert (settled.tool_name, settled.state) == ("calculate", call_pb2.CALL_STATE_SUCCEEDED)
    assert "42" in json.dumps(json.loads(settled.result.content_json))
    assert "No client ran form_or_calculate" in settled.result.note


async def test_the_user_is_asked_for_the_result_of_a_call_that_nobody_ran(agent: Agent) -> None:
    """FE-4"""
    run = await agent.start('call form_or_ask with {"expression": "2 * 21"}', options=NOBODY_RUNS_IT)
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    assert "form_or_ask" in call.question.question
    await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="forty-two")
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (settled,) = await agent.calls(run.run_id)
    assert b"forty-two" in settled.result.content_json


async def test_a_call_goes_on_elsewhere_when_the_process_that_holds_it_is_killed(
    suite: Suite, agent: Agent, other_agent: Agent
) -> None:
    """FE-2: killed in the middle of the call, without a goodbye."""
    run = await agent.start("show the map")
    await agent.until_pending(run.run_id, call_pb2.CALL_STATE_OFFERED)
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _HOLDER,
        suite.endpoints.services["agent-loop"][0].grpc,
        run.run_id,
        LOCAL_KEY,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    assert holder.stdout is not None
    epoch = int(await holder.stdout.readline())
    async with other_agent.session("show_panel", client_id="heir") as heir:
        await heir.receipt(attach=session_pb2.Attach(run_id=run.run_id))
        holder.kill()
        await holder.wait()
        offer = (await heir.next("offer")).offer
        assert offer.offer_epoch > epoch
        assert (await heir.answer(offer, b'{"shown":true}')).status == types_pb2.RECEIPT_STATUS_ACCEPTED
        assert (await heir.next("end")).end.state == run_pb2.RUN_STATE_COMPLETED
