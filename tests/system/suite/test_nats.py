"""NATS makes Pawl fast; without it Pawl is slower, and loses nothing."""

from __future__ import annotations

import asyncpg
import pytest

from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2
from pawl.launcher.suite import Suite
from pawl.notify.v1.notify_pb2 import NOTIFICATION_KIND_RUN_COMPLETED, ListNotificationsRequest
from tests.poll import until
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def told_once(pawl: AsyncClient, run_id: str) -> None:
    """Wait until the user is notified of the completion of a run."""
    told: list[str] = []

    async def is_told() -> bool:
        inbox = (await pawl.notifier.ListNotifications(ListNotificationsRequest(page_size=200))).notifications
        told[:] = [each.run_id for each in inbox if each.kind == NOTIFICATION_KIND_RUN_COMPLETED]
        return run_id in told

    await until(is_told)
    assert told.count(run_id) == 1


async def test_runs_go_on_while_nats_is_stopped_and_people_are_told_after(
    suite: Suite, agent: Agent, pawl: AsyncClient
) -> None:
    """Start, wait for a person, decide and watch, all without NATS; the notification follows when it is back."""
    await suite.stop_nats()
    try:
        run = await agent.start("book a table")
        call = await agent.until_pending(run.run_id, call_pb2.CALL_STATE_ASKED)
        await agent.decide(call, call_pb2.DECISION_KIND_ANSWER, answer="Tonight at 19:00")
        assert (await agent.events(run.run_id))[-1].type == "run.completed"
    finally:
        await suite.start_nats()
    await told_once(pawl, run.run_id)


async def test_the_end_of_a_run_is_told_though_nats_was_wiped_before_the_notifier_read_it(
    suite: Suite, agent: Agent, pawl: AsyncClient
) -> None:
    """NOTE-1: the stream had it, lost it, and gets it again; the inbox shows it once."""
    await suite.stop_process("notifier")
    run = await agent.start("what is 7 * 7?")
    await agent.until_ended(run.run_id)
    database = await asyncpg.connect(suite.database_url)

    async def all_sent() -> bool:
        return bool(await database.fetchval("SELECT count(*) = 0 FROM job_store.outbox"))

    await until(all_sent)
    await database.close()
    await suite.wipe_nats()
    await suite.start_process("notifier")
    await told_once(pawl, run.run_id)
