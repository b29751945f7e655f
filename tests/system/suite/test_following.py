"""WatchConversation on a whole suite: autonomous turns, kills, and streams that end when access ends."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pawl.client import AsyncClient
from pawl.event.v1 import run_pb2
from pawl.launcher.suite import Suite
from tests.system.suite.client import PATIENCE_SECONDS, kill

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMPLETED = run_pb2.RUN_STATE_COMPLETED


async def test_turn_after_a_job_appears_once_despite_kills(suite: Suite, pawl: AsyncClient) -> None:
    """ASYNC-5: messages and events arrive once and in order, also if every replica is killed."""
    run = await pawl.start("in the background: what is 6 * 7")
    numbers: list[int] = []
    events: dict[str, list[int]] = {}
    jobs: dict[str, int] = {}
    killed = False
    async with aclosing(pawl.follow(run.conversation_id)) as changes, asyncio.timeout(PATIENCE_SECONDS):
        async for change in changes:
            numbers += [item.message.number for item in change.items if item.HasField("message")]
            jobs |= {item.job.job_id: item.job.state for item in change.items if item.HasField("job")}
            for event in change.events:
                events.setdefault(event.run_id, []).append(event.seq)
            if change.caught_up and not killed:
                killed = True
                await kill(suite, "agent-loop")
            turns = [item.run for item in change.items if item.run.generation and item.run.HasField("end_time")]
            if turns:
                break
    messages = [message.number async for message in pawl.messages(run.conversation_id)]
    assert numbers == messages, "the messages of a run are sent before its end"
    assert list(jobs.values()) == [COMPLETED]
    for seqs in events.values():
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
