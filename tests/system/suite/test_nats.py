"""NATS makes Pawl fast; without it Pawl is slower, and loses nothing."""

from __future__ import annotations

import asyncpg
import pytest

from pawl.event.v1 import call_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1 import notify_pb2, notify_pb2_grpc
from tests.keys import keyed_channel
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _told(suite: Suite) -> list[str]:
    """The runs whose completion the user was told of."""
    async with keyed_channel(suite.endpoints.services["notifier"][0].grpc) as channel:
        stub = notify_pb2_grpc.NotifyServiceStub(channel)
        answer = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(page_size=200))
    wanted = notify_pb2.NOTIFICATION_KIND_RUN_COMPLETED
    return [found.run_id for found in answer.notifications if found.kind == wanted]


async def test_runs_go_on_while_nats_is_stopped_and_people_are_told_after(suite: Suite, agent: Agent) -> None:
    """Start, wait for a person, decide and watch, all without NATS; the notification follows when it is back."""
    await suite.stop_nats()
    try:
        run = await agent.start("book a table")
        call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
        await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight at 19:00")
        events = await agent.events(run.run_id)
        assert events[-1].type == "run.completed"
    finally:
        await suite.start_nats()
    await until(lambda: _told_of(suite, run.run_id))
    assert (await _told(suite)).count(run.run_id) == 1


async def test_a_wiped_nats_costs_nothing(suite: Suite, agent: Agent) -> None:
    """The stream, the consumer and the notifications come back by themselves."""
    before = await agent.start("what is 8 * 8?")
    await agent.until_ended(before.run_id)
    await until(lambda: _told_of(suite, before.run_id))
    await suite.wipe_nats()
    after = await agent.start("what is 9 * 9?")
    assert (await agent.until_ended(after.run_id)).state == run_pb2.RUN_STATE_COMPLETED
    await until(lambda: _told_of(suite, after.run_id))
    told = await _told(suite)
    assert told.count(before.run_id) == 1
    assert told.count(after.run_id) == 1


async def test_the_end_of_a_run_is_told_though_nats_was_wiped_before_anybody_heard_of_it(
    suite: Suite, agent: Agent
) -> None:
    """NOTE-1: the stream had it, lost it, and gets it again; the inbox shows it once."""
    await suite.stop_process("notifier")
    run = await agent.start("what is 7 * 7?")
    await agent.until_ended(run.run_id)
    await until(lambda: _all_sent(suite))
    await suite.wipe_nats()
    await suite.start_process("notifier")
    await until(lambda: _told_of(suite, run.run_id))
    assert (await _told(suite)).count(run.run_id) == 1


async def _all_sent(suite: Suite) -> bool:
    connection = await asyncpg.connect(suite.database_url)
    try:
        return bool(await connection.fetchval("SELECT count(*) = 0 FROM job_store.outbox"))
    finally:
        await connection.close()


async def _told_of(suite: Suite, run_id: str) -> bool:
    return run_id in await _told(suite)
