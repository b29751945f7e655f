"""Each step of the main job, through four real services."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json

import httpx2
import nats
import pytest
from nats.aio.msg import Msg

from pawl.agent.v1 import session_pb2, types_pb2
from pawl.chassis.bus import flush
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from tests.system.suite.client import PATIENCE_SECONDS, Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_run_computes_with_a_backend_tool_and_answers(agent: Agent) -> None:
    """LOOP-1, LOOP-3, TOOL-8: the loop goes on until the model answers, and the log tells it in order."""
    run = await agent.start("what is 17 * 23?")
    events = await agent.events(run.run_id)
    ended = await agent.get(run.run_id)
    types = [event.type for event in events]
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert "391" in ended.output_text
    assert types.index("tool.executing") < types.index("tool.completed") < types.index("run.completed")
    assert types[-1] == "run.completed"
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


async def test_a_later_call_of_a_batch_uses_what_an_earlier_one_created(agent: Agent) -> None:
    """LOOP-9, part C4: the child is added after its parent, by the parent's title."""
    run = await agent.start("add task Launch party with subtasks Book a room and Invite people")
    ended = await agent.until_ended(run.run_id)
    calls = await agent.calls(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert [call.tool_name for call in calls] == ["create_task", "add_subtask", "add_subtask"]
    assert {call.state for call in calls} == {call_pb2.CALL_STATE_SUCCEEDED}
    assert {call.round for call in calls} == {1}


async def test_the_output_shows_the_reasoning_of_the_model(agent: Agent) -> None:
    """HITL-8 in its first form: reasoning is streamed and stored."""
    run = await agent.start("what is 2 + 2?")
    events = await agent.events(run.run_id)
    streamed = "".join(event.output_delta.reasoning for event in events if event.HasField("output_delta"))
    stored = "".join(event.message_added.message.reasoning for event in events if event.HasField("message_added"))
    assert streamed
    assert stored == streamed


async def test_a_front_end_runs_a_call_over_the_stream(agent: Agent) -> None:
    """FE-2: the call is offered, run once and receipted; a second result changes nothing."""
    async with agent.session("show_panel") as session:
        started = await session.receipt(start=session_pb2.Start(text="show the weather report"))
        assert started.status == types_pb2.RECEIPT_STATUS_ACCEPTED
        offer = (await session.next("offer")).offer
        assert offer.call.tool_name == "show_panel"
        assert json.loads(offer.call.arguments_json)
        first = await session.answer(offer, b'{"shown":true}')
        second = await session.answer(offer, b'{"shown":false}')
        end = (await session.next("end")).end
    assert first.status == types_pb2.RECEIPT_STATUS_ACCEPTED
    assert second.status == types_pb2.RECEIPT_STATUS_LATE
    assert end.state == run_pb2.RUN_STATE_COMPLETED
    (call,) = await agent.calls(started.run_id)
    assert call.result.content_json == b'{"shown":true}'


async def test_an_offer_goes_to_another_client_when_its_holder_leaves(agent: Agent, other_agent: Agent) -> None:
    """FE-2: a disconnect re-offers the call, on any replica."""
    async with agent.session("show_panel", client_id="first") as first:
        run_id = (await first.receipt(start=session_pb2.Start(text="show the map"))).run_id
        held = (await first.next("offer")).offer
        async with other_agent.session("show_panel", client_id="second") as second:
            await second.receipt(attach=session_pb2.Attach(run_id=run_id))
            refused = await second.answer(held, b"1")
            assert refused.status == types_pb2.RECEIPT_STATUS_WRONG_HOLDER
    async with other_agent.session("show_panel", client_id="third") as third:
        await third.receipt(attach=session_pb2.Attach(run_id=run_id))
        offer = (await third.next("offer")).offer
        assert offer.offer_epoch > held.offer_epoch
        assert (await third.answer(offer, b"2")).status == types_pb2.RECEIPT_STATUS_ACCEPTED
        await third.next("end")


async def test_a_client_without_a_stream_returns_a_result(agent: Agent, other_agent: Agent) -> None:
    """FE-3: on any replica, without a session."""
    run = await agent.start("show the agenda")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_OFFERED)
    assert (await agent.get(run.run_id)).waits == [run_pb2.WAIT_KIND_TOOL_RESULT]
    answer = await other_agent.submit(call, b'"done"')
    assert [receipt.status for receipt in answer.receipts] == [types_pb2.RECEIPT_STATUS_ACCEPTED]
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    late = await agent.submit(call, b'"again"')
    assert [receipt.status for receipt in late.receipts] == [types_pb2.RECEIPT_STATUS_LATE]


async def test_the_answer_to_a_question_is_its_result(agent: Agent, other_agent: Agent) -> None:
    """HITL-1: the run waits, the answer becomes the result, the original intent goes on."""
    run = await agent.start("book a table")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
    assert call.question.question
    assert call.question.options
    await other_agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer=call.question.options[0])
    ended = await agent.until_ended(run.run_id)
    (asked,) = await agent.calls(run.run_id)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert call.question.options[0].encode() in asked.result.content_json


async def test_an_edited_approval_sends_the_edited_mail_once(suite: Suite, agent: Agent) -> None:
    """HITL-2, HITL-3: nothing is sent before the approval, and then exactly what was approved."""
    outbox = suite.folder.path / "outbox"
    before = set(outbox.glob("**/*.eml"))
    run = await agent.start("e-mail ann@example.com about Lunch: See you at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    assert set(outbox.glob("**/*.eml")) == before
    assert call.approval.digest
    edited = json.loads(call.arguments_json) | {"subject": "Dinner"}
    await agent.decide(call, call_pb2.DECISION_KIND_EDIT, arguments_json=json.dumps(edited).encode())
    ended = await agent.until_ended(run.run_id)
    (sent,) = set(outbox.glob("**/*.eml")) - before
    message = email.message_from_bytes(sent.read_bytes(), policy=email.policy.default)
    assert ended.state == run_pb2.RUN_STATE_COMPLETED
    assert message["subject"] == "Dinner"
    assert message["to"] == "ann@example.com"
    (settled,) = await agent.calls(run.run_id)
    assert "edited" in settled.result.note


async def test_a_rejected_call_never_runs(suite: Suite, agent: Agent) -> None:
    """HITL-2, I10: the model is told, the effect does not happen."""
    before = set((suite.folder.path / "outbox").glob("**/*.eml"))
    run = await agent.start("e-mail bob@example.com about Fees: Please pay")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(call, call_pb2.DECISION_KIND_REJECT, reason="not today")
    assert (await agent.until_ended(run.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    (rejected,) = await agent.calls(run.run_id)
    assert rejected.state == call_pb2.CALL_STATE_REJECTED
    assert rejected.result.is_error
    assert set((suite.folder.path / "outbox").glob("**/*.eml")) == before


async def test_a_subscriber_is_told_once_that_a_run_completed(suite: Suite, agent: Agent) -> None:
    """NOTE-1: a NATS subscriber that knows only the subject learns of it."""
    told: asyncio.Queue[notify_pb2.Notification] = asyncio.Queue()
    connection = await nats.connect(suite.nats_url())
    try:

        async def keep(message: Msg) -> None:
            told.put_nowait(notify_pb2.Notification.FromString(message.data))

        await connection.subscribe("pawl.v1.local.user.me.notifications", cb=keep)
        await flush(connection)
        run = await agent.start("what is 5 * 5?")
        await agent.until_ended(run.run_id)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (notification := await told.get()).run_id != run.run_id:
                pass
    finally:
        await connection.close()
    assert notification.kind == notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED


async def test_live_events_on_nats_are_those_of_the_log(suite: Suite, agent: Agent) -> None:
    """EVT-1: an outside subscriber gets the bytes that watchers get."""
    seen: dict[int, event_pb2.RunEvent] = {}
    connection = await nats.connect(suite.nats_url())
    try:

        async def keep(message: Msg) -> None:
            seen.update({event.seq: event for event in event_pb2.RunEvents.FromString(message.data).events})

        await connection.subscribe("pawl.v1.local.run.*.events", cb=keep)
        await flush(connection)
        run = await agent.start("what is 6 * 7?")
        logged = {event.seq: event for event in await agent.events(run.run_id)}
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(seen) < len(logged):
                await asyncio.sleep(0.01)
    finally:
        await connection.close()
    assert seen == logged


async def test_every_service_serves_metrics(suite: Suite, agent: Agent) -> None:
    """OPS-2 in its first form: Prometheus text with the service's own names."""
    await agent.events((await agent.start("what is 1 + 1?")).run_id)
    async with httpx2.AsyncClient(timeout=60.0) as http:
        for name, replicas in suite.endpoints.services.items():
            page = (await http.get(f"http://{replicas[0].metrics}/metrics")).text
            assert f"pawl_{name.replace('-', '_')}_" in page
