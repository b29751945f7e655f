"""Watching: the same bytes for everyone, from any position, through any replica (EVT-1 to EVT-4, I7)."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import pytest

from pawl.agent.v1 import agent_pb2, session_pb2, types_pb2
from pawl.event.v1 import event_pb2
from tests.system.suite.client import Agent

pytestmark = pytest.mark.asyncio(loop_scope="session")


def _bytes(events: list[event_pb2.RunEvent]) -> list[bytes]:
    return [event.SerializeToString(deterministic=True) for event in events]


async def test_a_client_that_attaches_at_any_seq_sees_the_rest_byte_for_byte(agent: Agent, other_agent: Agent) -> None:
    """EVT-1: after the run has ended, through both replicas."""
    run = await agent.start("count to 40")
    whole = _bytes(await agent.events(run.run_id))
    for after_seq in range(len(whole) + 1):
        watcher = (agent, other_agent)[after_seq % 2]
        assert _bytes(await watcher.events(run.run_id, after_seq=after_seq)) == whole[after_seq:]


async def test_watchers_of_a_live_run_that_come_and_go_see_one_sequence(agent: Agent, other_agent: Agent) -> None:
    """EVT-1: each watcher disconnects after every few events and goes on where it was."""
    run = await agent.start("count to 60 slowly")

    async def watch_in_pieces(watcher: Agent, length: int) -> list[event_pb2.RunEvent]:
        seen: list[event_pb2.RunEvent] = []
        while not seen or not seen[-1].type.startswith("run.completed"):
            after_seq = seen[-1].seq if seen else 0
            async with contextlib.aclosing(watcher.watch(run.run_id, after_seq=after_seq)) as events:
                count = 0
                async for event in events:
                    seen.append(event)
                    count += 1
                    if count == length:
                        break
        return seen

    watchers = [watch_in_pieces((agent, other_agent)[length % 2], length) for length in (1, 2, 3, 5, 8)]
    seen = await asyncio.gather(*watchers)
    whole = _bytes(await agent.events(run.run_id))
    assert all(_bytes(events) == whole for events in seen)


async def test_200_watchers_through_two_replicas_have_the_log(agent: Agent, other_agent: Agent) -> None:
    """EVT-1, I7: attached at each seq as it comes, and leaving and coming back at random on either replica."""
    choose = random.Random(1)
    run = await agent.start("count to 80 slowly")
    last_seq = 0

    async def lead() -> None:
        nonlocal last_seq
        async for event in agent.watch(run.run_id):
            last_seq = event.seq

    async def watch(after_seq: int) -> tuple[int, list[event_pb2.RunEvent]]:
        seen: list[event_pb2.RunEvent] = []
        while not seen or seen[-1].type != "run.completed":
            watcher = choose.choice((agent, other_agent))
            most = choose.choice((2, 10, 1000))
            async with contextlib.aclosing(watcher.watch(run.run_id, after_seq=after_seq + len(seen))) as events:
                async for event in events:
                    seen.append(event)
                    most -= 1
                    if not most:
                        break
        return after_seq, seen

    leading = asyncio.create_task(lead())
    watching: list[asyncio.Task[tuple[int, list[event_pb2.RunEvent]]]] = []
    while len(watching) < 200:
        # The last event ends the stream of whoever attaches there.
        watching.append(asyncio.create_task(watch(min(len(watching) // 4, max(last_seq - 1, 0)))))
        await asyncio.sleep(0)
    found = await asyncio.gather(*watching)
    await leading
    whole = _bytes(await agent.events(run.run_id))
    for after_seq, seen in found:
        assert _bytes(seen) == whole[after_seq:]


async def test_output_comes_in_a_tenth_of_the_chunks(agent: Agent) -> None:
    """EVT-2, D3: a long answer is told in few events, all before the end."""
    events = await agent.events((await agent.start("count to 400")).run_id)
    deltas = [event for event in events if event.HasField("output_delta")]
    message = next(
        event.message_added.message
        for event in reversed(events)
        if event.HasField("message_added") and event.message_added.message.text
    )
    assert "".join(event.output_delta.text for event in deltas) == message.text
    assert len(deltas) * 4 < len(message.text.split())
    assert message.last_output_seq == deltas[-1].seq


async def test_an_attach_beyond_the_end_is_out_of_range(agent: Agent) -> None:
    """Bad input: a typed error that says where the log ends, on both kinds of watching."""
    run = await agent.start("what is 3 * 3?")
    end = (await agent.events(run.run_id))[-1].seq
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await agent.events(run.run_id, after_seq=end + 1)
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    async with agent.session() as session:
        receipt = await session.receipt(attach=session_pb2.Attach(run_id=run.run_id, after_seq=end + 1))
    assert receipt.status == types_pb2.RECEIPT_STATUS_REFUSED
    assert receipt.reason == "SEQ_BEYOND_END"


async def test_a_foreign_run_is_the_same_as_an_absent_one(agent: Agent) -> None:
    """I13: another user and another store get the very bytes that an absent id gets."""
    run = await agent.start("what is 4 * 4?")

    async def refusal(run_id: str, store: str, user: str) -> tuple[grpc.StatusCode, str | None, bytes]:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.stub.GetRun(
                agent_pb2.GetRunRequest(run_id=run_id), metadata=(("pawl-store", store), ("pawl-user", user))
            )
        trailers = dict(refused.value.trailing_metadata() or ())
        return refused.value.code(), refused.value.details(), bytes(trailers["grpc-status-details-bin"])

    absent = await refusal("run_absent", "local", "me")
    assert absent[0] is grpc.StatusCode.NOT_FOUND
    assert await refusal(run.run_id, "local", "somebody") == absent
    assert await refusal(run.run_id, "elsewhere", "me") == absent
