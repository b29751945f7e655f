"""The main path: what a run does, through all services."""

from __future__ import annotations

import asyncio
import base64
import email
import email.policy
import json
from pathlib import Path

import grpc
import httpx2
import nats
import pytest
from nats.aio.msg import Msg

from pawl.agent.v1 import agent_pb2, session_pb2, steps_pb2, types_pb2, undo_pb2
from pawl.chassis.bus import flush
from pawl.client import AsyncClient, Client, edit, file, form, image, output
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.tool.v1 import source_pb2, source_pb2_grpc
from pawl.tools import Category, EffectClass, ToolContext, tool
from tests.fakes.images import PNG
from tests.fakes.mcp_program import stdio_config
from tests.keys import LOCAL_KEY, keyed_channel
from tests.poll import until
from tests.system.suite.client import Agent, addresses, mails_sent

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETED = run_pb2.RUN_STATE_COMPLETED
SUCCEEDED = call_pb2.CALL_STATE_SUCCEEDED


async def test_a_run_computes_with_a_tool_and_answers_and_nats_is_told(suite: Suite, agent: Agent) -> None:
    """LOOP-1, LOOP-3, TOOL-8, EVT-1, NOTE-1: in order in the log, and by NATS: each event and one notification."""
    seen: dict[int, event_pb2.RunEvent] = {}
    told: list[notify_pb2.Notification] = []
    connection = await nats.connect(suite.nats_url())

    async def keep_events(message: Msg) -> None:
        seen.update({event.seq: event for event in event_pb2.RunEvents.FromString(message.data).events})

    async def keep_notification(message: Msg) -> None:
        told.append(notify_pb2.Notification.FromString(message.data))

    try:
        await connection.subscribe("pawl.v1.local.run.*.events", cb=keep_events)
        await connection.subscribe("pawl.v1.local.user.una.notifications", cb=keep_notification)
        await flush(connection)
        async with Agent(addresses(suite)[0], user="una") as una:
            run = await una.start("what is 17 * 23?")
            events = await una.whole_log(run.run_id)
            ended = await una.get(run.run_id)

        async def all_told() -> bool:
            return len(seen) >= len(events) and bool(told)

        await until(all_told)
    finally:
        await connection.close()
    types = [event.type for event in events]
    assert (ended.state, "391" in ended.output_text) == (COMPLETED, True)
    assert types.index("tool.executing") < types.index("tool.completed") < types.index("run.completed")
    assert [seen.get(event.seq) for event in events] == events
    completed = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    assert [(each.run_id, each.kind) for each in told] == [(run.run_id, completed)]
    async with httpx2.AsyncClient(timeout=60.0) as http:
        for name, replicas in suite.endpoints.services.items():
            page = (await http.get(f"http://{replicas[0].metrics}/metrics")).text
            assert f"pawl_{name.replace('-', '_')}_" in page, "OPS-2"


async def test_the_steps_of_a_run_show_its_reasoning_as_it_was_streamed(agent: Agent) -> None:
    """HITL-8"""
    run = await agent.start("what is 2 + 2?")
    stream = agent.stub.WatchSteps(steps_pb2.WatchStepsRequest(run_id=run.run_id), metadata=agent.metadata)
    watched: dict[str, steps_pb2.Step] = {}
    async for response in stream:
        for change in response.changes:
            before = watched.get(change.step.step_id, steps_pb2.Step()).content if change.appends else ""
            change.step.content = before + change.step.content
            watched[change.step.step_id] = change.step
    listed = (await agent.stub.ListSteps(steps_pb2.ListStepsRequest(run_id=run.run_id), metadata=agent.metadata)).steps
    assert watched == {step.step_id: step for step in listed}
    events = await agent.events(run.run_id)
    streamed = "".join(event.output_delta.reasoning for event in events if event.HasField("output_delta"))
    assert streamed
    assert "".join(step.content for step in listed if step.type == steps_pb2.STEP_TYPE_REASONING) == streamed


async def test_an_edited_approval_sends_the_edited_mail_once_and_a_rejected_call_nothing(
    suite: Suite, agent: Agent, other_agent: Agent
) -> None:
    """HITL-2, HITL-3, I9, I10: of many decisions at once one counts, and what was approved is what is sent."""
    before = mails_sent(suite)
    run = await agent.start("e-mail ann@example.com about Lunch: See you at noon")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    wrong = json.loads(call.arguments_json) | {"to": "nobody", "expression": "1"}
    edited = json.loads(call.arguments_json) | {"subject": "Dinner"}

    async def decide(client: Agent, arguments: dict[str, object]) -> str:
        try:
            await client.decide(call, call_pb2.DECISION_KIND_EDIT, arguments_json=json.dumps(arguments).encode())
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return ""

    assert await decide(agent, wrong) == "INVALID_ARGUMENT"
    assert mails_sent(suite) == before
    decided = await asyncio.gather(*(decide((agent, other_agent)[number % 2], edited) for number in range(10)))
    assert sorted(decided) == ["", *["FAILED_PRECONDITION"] * 9]
    assert (await agent.until_ended(run.run_id)).state == COMPLETED
    (sent,) = mails_sent(suite) - before
    message = email.message_from_bytes(Path(sent).read_bytes(), policy=email.policy.default)
    assert (message["subject"], message["to"]) == ("Dinner", "ann@example.com")
    (settled,) = await agent.calls(run.run_id)
    assert "edited" in settled.result.note

    run = await agent.start("e-mail bob@example.com about Fees: Please pay")
    call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    await agent.decide(call, call_pb2.DECISION_KIND_REJECT, reason="not today")
    assert (await agent.until_ended(run.run_id)).state == COMPLETED
    (rejected,) = await agent.calls(run.run_id)
    assert (rejected.state, rejected.result.is_error) == (call_pb2.CALL_STATE_REJECTED, True)
    assert mails_sent(suite) == before | {sent}


async def test_an_approval_below_is_seen_at_the_top_and_given_from_the_inbox(agent: Agent) -> None:
    """TOOL-7, HITL-6"""
    run = await agent.start("ask an agent to e-mail ann@example.com about lunch: at noon")
    seen = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
    pending = await agent.stub.ListPending(agent_pb2.ListPendingRequest(), metadata=agent.metadata)
    (call,) = [each for each in pending.calls if each.call_id == seen.call_id]
    assert (call.run_id != run.run_id, call.tool_name) == (True, "send_email")
    await agent.decide(call, call_pb2.DECISION_KIND_APPROVE)
    ended, child = await agent.until_ended(run.run_id), await agent.until_ended(call.run_id)
    assert (ended.state, child.state, child.parent_run_id) == (COMPLETED, COMPLETED, run.run_id)
    (delegated,) = await agent.calls(run.run_id)
    assert json.loads(delegated.result.content_json) == {"answer": child.output_text}
    assert ended.usage.model_calls > child.usage.model_calls > 0


async def test_what_an_agent_made_is_taken_back_with_the_consent_of_the_user(agent: Agent) -> None:
    """HITL-7, LOOP-9: subtasks are added below their new parent; each deletion is approved."""
    run = await agent.start("add task Moving house with subtasks Pack the books and Cancel the lease")
    await agent.until_ended(run.run_id)
    calls = await agent.calls(run.run_id)
    assert [call.tool_name for call in calls] == ["create_task", "add_subtask", "add_subtask"]
    assert {call.state for call in calls} == {SUCCEEDED}
    undoing = (await agent.stub.UndoRun(undo_pb2.UndoRunRequest(run_id=run.run_id), metadata=agent.metadata)).run
    for _ in calls:
        waiting = await agent.until_pending(undoing.run_id, call_pb2.CALL_STATE_AWAITING_APPROVAL)
        await agent.decide(waiting, call_pb2.DECISION_KIND_APPROVE)
        await agent.until(undoing.run_id, lambda run, asked=waiting: asked not in run.pending_calls)  # type: ignore[misc]
    assert (await agent.until_ended(undoing.run_id)).state == COMPLETED
    listed = await agent.start("call list_projects")
    await agent.until_ended(listed.run_id)
    assert b"Moving house" not in (await agent.calls(listed.run_id))[0].result.content_json


async def test_a_tool_asks_its_user_in_the_middle_of_a_call(agent: Agent, other_agent: Agent, effects: Path) -> None:
    """HITL-1"""
    run = await agent.start(f"call order_once with {json.dumps({'path': str(effects)})}")
    for question, answer in (("Which colour?", "red"), ("Which size?", "large")):
        asked = await agent.until(
            run.run_id,
            lambda run, text=question: any(each.question.question == text for each in run.pending_calls),  # type: ignore[misc]
        )
        await other_agent.decide(asked.pending_calls[0], call_pb2.DECISION_KIND_ANSWER, answer=answer)
    assert (await agent.until_ended(run.run_id)).state == COMPLETED
    (done,) = await agent.calls(run.run_id)
    assert (done.state, done.result.content_json) == (SUCCEEDED, b'"red large"')
    assert effects.read_text() == "red large\n"


async def test_an_mcp_server_asks_its_user_and_reads_no_secret_of_the_suite(
    suite: Suite, agent: Agent, tmp_path: Path
) -> None:
    """HITL-1, TOOL-3, OPS-1: the secrets not even if it may read everything."""
    schema = {"type": "object", "properties": {"size": {"type": "string", "enum": ["s", "m"]}}}
    asks = {"message": "Which size?", "requestedSchema": schema}
    tools = [{"name": name, "description": "Does it.", "inputSchema": {"type": "object"}} for name in ("ask", "read")]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    safe = source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)
    server = source_pb2.SourceConfig(
        name="server", mcp_stdio=stdio_config(tmp_path, readable_paths=["/"]), policies=[safe]
    )
    secrets = Path(suite.endpoints.secrets)
    paths = (secrets / "local-key", secrets / "service-key-agent-loop", tmp_path / "tools.json")
    async with keyed_channel(addresses(suite, "tool-registry")[0]) as channel:
        sources = source_pb2_grpc.SourceServiceStub(channel)
        await sources.AddSource(source_pb2.AddSourceRequest(config=server))
        try:
            run = await agent.start(f"call server__ask with {json.dumps({'asks': asks})}")
            call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
            with pytest.raises(grpc.aio.AioRpcError, match="the answer does not fit"):
                await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="enormous")
            await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="m")
            await agent.until_ended(run.run_id)
            (asked,) = await agent.calls(run.run_id)
            read = []
            for path in paths:
                run = await agent.start(f"call server__read with {json.dumps({'path': str(path)})}")
                await agent.until_ended(run.run_id)
                read.append((await agent.calls(run.run_id))[0].result.content_json.decode())
        finally:
            await sources.RemoveSource(source_pb2.RemoveSourceRequest(name=server.name))
    assert json.loads(json.loads(asked.result.content_json)) == {"action": "accept", "content": {"size": "m"}}
    assert ["Permission denied" in text for text in read] == [True, True, False]


async def test_a_front_end_runs_a_call_over_the_stream(agent: Agent) -> None:
    """FE-2: the call is offered, run once and receipted; a second result changes nothing."""
    async with agent.session("show_panel") as session:
        refused = await session.receipt(start=session_pb2.Start(text=""))
        assert (refused.status, refused.reason) == (types_pb2.RECEIPT_STATUS_REFUSED, "INVALID_FIELD")
        started = await session.receipt(start=session_pb2.Start(text="show the weather report"))
        assert started.status == types_pb2.RECEIPT_STATUS_ACCEPTED
        offer = (await session.next("offer")).offer
        first = await session.answer(offer, b'{"shown":true}')
        second = await session.answer(offer, b'{"shown":false}')
        end = (await session.next("end")).end
    assert (first.status, second.status) == (types_pb2.RECEIPT_STATUS_ACCEPTED, types_pb2.RECEIPT_STATUS_LATE)
    assert end.state == COMPLETED
    (call,) = await agent.calls(started.run_id)
    assert call.result.content_json == b'{"shown":true}'


async def test_a_program_without_asyncio_starts_shows_approves_uploads_and_names(suite: Suite, tmp_path: Path) -> None:
    """FE-2, HITL-2"""
    (tmp_path / "closed.txt").write_text("The office is closed on 24 December.")
    elsewhere = {"PAWL_TOOL_REGISTRY_ADDRESS": addresses(suite, "tool-registry")[0]}

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    def show_report(title: str, context: ToolContext) -> dict[str, str]:
        """Show a report to the user."""
        context.progress(0.5, "drawing")
        return {"shown": title, "to": context.user_id}

    def program() -> None:
        client = Client(addresses(suite), api_key=LOCAL_KEY, environment=elsewhere, retry_seconds=240.0)
        with client as pawl, pawl.session(tools=[show_report]) as session:
            pawl.upload(tmp_path / "closed.txt")
            assert "closed.txt" in [document.name for document in pawl.documents()]
            shown = session.start('call show_report with {"title": "Plan"}')
            assert "".join(pawl.text(shown))
            assert [call.result.content_json for call in pawl.calls(shown)] == [b'{"shown":"Plan","to":"me"}']
            mail = pawl.start("e-mail kim@example.com about Lunch: See you at noon", conversation_key="ticket-7")
            (gated,) = pawl.get(mail.run_id, wait_seconds=60).pending_calls
            pending = [item.call_id for item in pawl.pending() if isinstance(item, call_pb2.Call)]
            assert gated.call_id in pending
            pawl.decide(edit(gated, {"to": "kim@example.com", "subject": "Dinner", "body": "At eight"}))
            assert pawl.result(mail.run_id).state == COMPLETED
            found = pawl.get_conversation(conversation_key="ticket-7")
            pawl.update_conversation(found.conversation_id, title="Sums", labels={"case": "7"})
            assert [each.title for each in pawl.list_conversations(labels={"case": "7"})] == ["Sums"]
            pawl.update_conversation(found.conversation_id, archived=True, labels={})
            archived = [each.conversation_id for each in pawl.list_conversations(archived=True)]
            assert found.conversation_id in archived

    await asyncio.to_thread(program)


async def test_the_model_sees_images_and_documents_and_answers_in_a_form(
    suite: Suite, pawl: AsyncClient, tmp_path: Path
) -> None:
    """The largest message goes through, and its image stays in the conversation."""
    (tmp_path / "dot.png").write_bytes(PNG)
    await pawl.put_document("plants.md", "Water them on Mondays.")
    run = await pawl.start("who are you, and what is this?", parts=[image(tmp_path / "dot.png"), file("plants.md")])
    assert (await pawl.result(run.run_id)).state == COMPLETED
    (message, _) = [message async for message in pawl.messages(run.conversation_id)]
    assert message.role == message_pb2.ROLE_USER
    assert [part.WhichOneof("kind") for part in message.parts] == ["text", "image", "file"]
    base_url = (suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as model:
        requests = (await model.get("/_pawl/requests")).json()["requests"]
    contents = [each["body"]["messages"][-1]["content"] for each in requests]
    (asked,) = [content for content in contents if "what is this?" in json.dumps(content)]
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert {"type": "image_url", "image_url": {"url": url}} in asked
    assert "Water them on Mondays." in asked[2]["text"]

    first = await pawl.start(parts=[image(PNG + bytes(1024 * 1024 - len(PNG)))])
    assert (await pawl.result(first.run_id)).state == COMPLETED
    properties = {"answer": {"type": "string"}, "sure": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    options = run_pb2.RunOptions(response_format=form(schema, strict=True))
    second = await pawl.start("what is 17 * 23?", conversation_id=first.conversation_id, options=options)
    done = await pawl.result(second.run_id)
    assert (done.state, "391" in output(done)["answer"]) == (COMPLETED, True)
