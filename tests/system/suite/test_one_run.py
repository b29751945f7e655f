"""The main path of a run through all services."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import httpx2
import nats
import pytest
from nats.aio.msg import Msg

from pawl.client import AsyncClient, file, image
from pawl.event.v1 import event_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.server.bus.connection import flush
from tests.fakes.images import PNG
from tests.poll import until
from tests.system.suite.client import Agent, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETED = run_pb2.RUN_STATE_COMPLETED


async def test_run_uses_a_tool_answers_and_publishes_to_nats(suite: Suite, agent: Agent) -> None:
    """LOOP-1, LOOP-3, TOOL-8, EVT-1, NOTE-1: the log and NATS have the same events, and the end is notified once."""
    seen: dict[int, event_pb2.RunEvent] = {}
    reported: list[notify_pb2.Notification] = []
    connection = await nats.connect(suite.nats_url())

    async def keep_events(message: Msg) -> None:
        seen.update({event.seq: event for event in event_pb2.RunEvents.FromString(message.data).events})

    async def keep_notification(message: Msg) -> None:
        reported.append(notify_pb2.Notification.FromString(message.data))

    try:
        await connection.subscribe("pawl.v1.local.run.*.events", cb=keep_events)
        await connection.subscribe("pawl.v1.local.user.una.notifications", cb=keep_notification)
        await flush(connection)
        async with Agent(addresses(suite)[0], user="una") as una:
            run = await una.start("what is 17 * 23?")
            events = await una.whole_log(run.run_id)
            ended = await una.get(run.run_id)
        await until(lambda: len(seen) >= len(events) and reported)
    finally:
        await connection.close()
    types = [event.type for event in events]
    assert (ended.state, "391" in ended.output_text) == (COMPLETED, True)
    assert types.index("tool.executing") < types.index("tool.completed") < types.index("run.completed")
    assert [seen.get(event.seq) for event in events] == events
    completed = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    assert [(each.run_id, each.kind) for each in reported] == [(run.run_id, completed)]
    async with httpx2.AsyncClient(timeout=60.0) as http:
        for name, replicas in suite.endpoints.services.items():
            page = (await http.get(f"http://{replicas[0].metrics}/metrics")).text
            assert f"pawl_{name.replace('-', '_')}_" in page, "OPS-2"


async def test_model_receives_images_and_documents(suite: Suite, pawl: AsyncClient, tmp_path: Path) -> None:
    """The largest allowed message is accepted, and its image stays in the conversation."""
    await pawl.put_document("plants.md", "Water them on Mondays.")
    largest = PNG + bytes(1024 * 1024 - len(PNG) - 100)
    run = await pawl.start("who are you, and what is this?", parts=[image(largest), file("plants.md")])
    assert (await pawl.result(run.run_id)).state == COMPLETED
    (message, _) = [message async for message in pawl.messages(run.conversation_id)]
    assert [part.WhichOneof("kind") for part in message.parts] == ["text", "image", "file"]
    base_url = (suite.endpoints.model_base_url or "").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base_url, timeout=60.0) as model:
        requests = (await model.get("/_pawl/requests")).json()["requests"]
    contents = [each["body"]["messages"][-1]["content"] for each in requests]
    (asked,) = [content for content in contents if "what is this?" in json.dumps(content)]
    url = f"data:image/png;base64,{base64.b64encode(largest).decode()}"
    assert {"type": "image_url", "image_url": {"url": url}} in asked
    assert "Water them on Mondays." in asked[2]["text"]
    after = await pawl.start("what is 17 * 23?", conversation_id=run.conversation_id)
    assert (await pawl.result(after.run_id)).state == COMPLETED
