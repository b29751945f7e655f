"""The main path of a run through all services."""

from __future__ import annotations

import httpx2
import nats
import pytest
from nats.aio.msg import Msg

from pawl.event.v1 import event_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2
from pawl.server.bus.connection import flush
from tests.poll import until
from tests.system.suite.client import Agent, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETED = run_pb2.RUN_STATE_COMPLETED
# Metrics of the replicas that a run used.
_MEASURED = {
    "agent-loop": (
        'model_calls_total{outcome="answered",provider="127.0.0.1",store="local"}',
        'model_tokens_total{kind="input",provider="127.0.0.1",store="local"}',
        'model_first_token_seconds_count{provider="127.0.0.1",store="local"}',
        "model_added_latency_seconds_count",
        "watch_lag_events 0.0",
    ),
    "job-store": ('runs_ended_total{cause="",outcome="completed",store="local"}', "database_wait_seconds_count"),
    "tool-registry": ('executions_total{outcome="SUCCEEDED",store="local",tool="',),
}


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
            page = "".join([(await http.get(f"http://{each.metrics}/metrics")).text for each in replicas])
            assert f"pawl_{name.replace('-', '_')}_" in page, "OPS-2"
            for sample in _MEASURED.get(name, ()):
                assert f"pawl_{name.replace('-', '_')}_{sample}" in page, "OPS-2"
