"""Front-end calls through the whole suite: nobody runs them, or the process that holds one is killed (FE-2, FE-4)."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from tests.keys import LOCAL_KEY
from tests.system.suite.client import Agent, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOBODY_RUNS_IT = run_pb2.RunOptions(limits=run_pb2.RunLimits(offer_deadline_seconds=0.5))

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


async def test_a_call_that_no_client_runs_falls_back_as_its_tool_says(agent: Agent, other_agent: Agent) -> None:
    """FE-3, FE-4, FE-5: it fails, a backend tool takes its place, or the user is asked; a later result is late."""
    forms = ("form_that_fails", "form_or_calculate", "form_or_ask")
    prompts = [f'call {form} with {{"expression": "2 * 21"}}' for form in forms]
    fails, calculates, asks = [await agent.start(prompt, options=NOBODY_RUNS_IT) for prompt in prompts]
    question = await agent.until_pending(asks.run_id, call_pb2.CALL_STATE_ASKED)
    assert "form_or_ask" in question.question.question
    await agent.decide(question, call_pb2.DECISION_KIND_ANSWER, answer="forty-two")
    settled = []
    for run in (fails, calculates, asks):
        assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
        # The scripted model does not find the name of its tool in the history, and asks again.
        settled.append((await agent.calls(run.run_id))[0])
    failed, calculated, answered = settled
    assert (failed.state, failed.result.is_error) == (call_pb2.CALL_STATE_EXPIRED, True)
    late = await other_agent.submit(failed, b"42")
    assert [receipt.status for receipt in late.receipts] == [types_pb2.RECEIPT_STATUS_LATE]
    assert (calculated.tool_name, calculated.state) == ("calculate", call_pb2.CALL_STATE_SUCCEEDED)
    assert "No client ran form_or_calculate" in calculated.result.note
    assert b"forty-two" in answered.result.content_json
    served = await agent.start(prompts[0])
    call = await agent.until_pending(served.run_id, call_pb2.CALL_STATE_OFFERED)
    answer = await other_agent.submit(call, b"42")
    assert [receipt.status for receipt in answer.receipts] == [types_pb2.RECEIPT_STATUS_ACCEPTED]
    assert (await agent.until_ended(served.run_id)).state == run_pb2.RUN_STATE_COMPLETED


async def test_a_call_goes_on_elsewhere_when_the_process_that_holds_it_is_killed(
    suite: Suite, agent: Agent, other_agent: Agent
) -> None:
    """FE-2: killed in the middle of the call, without a goodbye."""
    run = await agent.start("show the map")
    await agent.until_pending(run.run_id, call_pb2.CALL_STATE_OFFERED)
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", _HOLDER, addresses(suite)[0], run.run_id, LOCAL_KEY),
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
