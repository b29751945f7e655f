"""WatchConversation on a whole suite: autonomous turns, kills, and streams that end when access ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from pawl.agent.v1 import conversation_pb2 as pb
from pawl.client import AsyncClient
from pawl.errors import ConversationErased, ConversationNotFound, PawlError, Unauthenticated
from pawl.event.v1 import run_pb2
from pawl.identity.v1 import key_pb2
from pawl.identity.v1.key_pb2_grpc import KeyServiceStub
from pawl.launcher.suite import Suite
from tests.keys import keyed_channel
from tests.system.suite.client import PATIENCE_SECONDS, addresses, kill

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


async def reason(changes: AsyncIterator[pb.WatchConversationResponse]) -> type[PawlError]:
    with pytest.raises(PawlError) as error:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for _ in changes:
                pass
    return type(error.value)


async def test_streams_end_when_the_caller_may_no_longer_read(suite: Suite, pawl: AsyncClient) -> None:
    run = await pawl.result((await pawl.start("what is 4711 * 17")).run_id)
    conversation_id = run.conversation_id
    await pawl.share(conversation_id)
    async with keyed_channel(addresses(suite, "job-store")[0]) as channel:
        keys = KeyServiceStub(channel)
        made = [
            await keys.CreateKey(
                key_pb2.CreateKeyRequest(key=key_pb2.Key(name="x", store_id="local", user_id=user, roles=["member"]))
            )
            for user in ("ute", "vera")
        ]
        address = addresses(suite)
        async with (
            AsyncClient(address, api_key=made[0].secret, environment={}) as ute,
            AsyncClient(address, api_key=made[1].secret, environment={}) as vera,
            aclosing(pawl.follow(conversation_id)) as mine,
            aclosing(ute.follow(conversation_id)) as of_ute,
            aclosing(vera.follow(conversation_id)) as of_vera,
        ):
            streams: list[Any] = [mine, of_ute, of_vera]
            for stream in streams:
                while not (await anext(stream)).caught_up:
                    pass
            await keys.RevokeKey(key_pb2.RevokeKeyRequest(key_id=made[1].key.key_id))
            assert await reason(of_vera) is Unauthenticated
            await pawl.share(conversation_id, private=True)
            assert await reason(of_ute) is ConversationNotFound
            await pawl.erase(conversation_id)
            assert await reason(mine) is ConversationErased
