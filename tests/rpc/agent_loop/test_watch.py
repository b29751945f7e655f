"""Watching runs: all watchers get the same complete bytes, and no watcher delays another (EVT-1, EVT-3, I7)."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.agent_loop.api.feed import BEHIND_EVENTS_MAX
from pawl.agent_loop.api.rpc import HEARTBEAT_SECONDS
from pawl.agent_loop.api.session_stream import SessionTimes
from pawl.agent_loop.api.watch import Watches
from pawl.chassis.ids import RunId
from pawl.errors import Internal, Overloaded, PawlError, SlowConsumer
from pawl.event.v1 import event_pb2
from pawl.values import RunState
from tests import poll
from tests.fakes.session_agent import FakeLive
from tests.poll import until
from tests.rpc.agent_loop.asking import Client
from tests.rpc.agent_loop.conftest import ME
from tests.rpc.agent_loop.ledger import ME as CALLER
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.refusals import raises
from tests.rpc.stubs import AgentServiceAsyncStub

pytestmark = pytest.mark.usefixtures("run")


async def watch(stub: AgentServiceAsyncStub, after_seq: int = 0) -> list[bytes]:
    stream = stub.WatchRun(agent_pb2.WatchRunRequest(run_id="run_1", after_seq=after_seq), metadata=ME)
    return [event.SerializeToString() async for response in stream for event in response.events]


def log(ledger: PlayedLedger, after_seq: int = 0) -> list[bytes]:
    return [event.SerializeToString() for event in ledger.log()[after_seq:]]


@pytest.mark.parametrize("seed", range(2))
async def test_20_watchers_at_random_positions_see_the_same_bytes(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive, watches: Watches, seed: int
) -> None:
    """I7: watchers attach at random times and positions while some live events are lost."""
    choose = random.Random(seed)
    live.lose = lambda _seq: choose.random() < 0.2
    watching: list[tuple[int, asyncio.Task[list[bytes]]]] = []
    while len(watching) < 20:
        after_seq = choose.randint(0, ledger.last_seq())
        watching.append((after_seq, asyncio.create_task(watch(stub, after_seq))))
        await ledger.append(count=choose.randint(0, 9))
        if choose.random() < 0.3:
            await asyncio.sleep(choose.random() * 0.01)
    await ledger.finish()
    for after_seq, task in watching:
        assert await task == log(ledger, after_seq)
    await until(lambda: watches.feed_count == 0 and live.subscriber_count == 0)


async def test_watching_without_nats_is_slower_but_complete(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive
) -> None:
    live.connected = False
    watching = asyncio.create_task(watch(stub))
    await until(lambda: live.subscriber_count)
    await ledger.append(count=30)
    await ledger.finish()
    assert await watching == log(ledger)


@pytest.mark.parametrize(
    "parts",
    [
        [(2, 3), (0, 1), (0, 1), (3, 4), (1, 2), (6, 7), (4, 5), (4, 5), (7, 8), (5, 6), (11, 12)],
        [(4, 8), (1, 6), (0, 3), (0, 3), (9, 12), (2, 10)],
    ],
    ids=["single events", "several at once"],
)
async def test_reordered_and_duplicate_live_events_are_corrected(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive, parts: list[tuple[int, int]]
) -> None:
    held: list[event_pb2.RunEvent] = []
    publish = live.publish

    async def hold(*events: event_pb2.RunEvent) -> None:
        held.extend(events)

    watching = asyncio.create_task(watch(stub))
    await until(lambda: live.subscriber_count and ledger.reads)
    live.publish = hold  # type: ignore[method-assign]
    await ledger.append(count=11)
    await ledger.finish()
    for first, end in parts:
        await publish(*held[first:end])
    assert await watching == log(ledger)


async def test_gap_is_filled_before_the_next_poll(ledger: PlayedLedger, live: FakeLive) -> None:
    live.lose = lambda seq: seq == 2
    async with (
        Watches(ledger=ledger, live=live, poll_seconds=3600) as watches,
        watches.open(CALLER, RunId("run_1"), 1) as watcher,
    ):
        await ledger.append(count=2)
        events = watcher.events()
        found = [await anext(events), await anext(events)]
        assert [event.seq for event in found if isinstance(event, event_pb2.RunEvent)] == [2, 3]
        await events.aclose()


async def test_stream_counts_as_a_viewer_only_once_the_client_confirms(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive
) -> None:
    """NOTE-1: a stream may have no reader.

    A session confirms with its next frame; other clients name the last event.
    """
    viewer = (CALLER.store_id, CALLER.user_id, "run_1")
    watching, session = asyncio.create_task(watch(stub)), Client(stub)
    await session.hello()
    await session.attach()
    await ledger.append(count=9, text="x" * 100_000)  # More than the connection buffers while the client does not read
    await ledger.change("run_1", RunState.WAITING)
    await session.heartbeat()
    ticks = live.ticks
    for after_seq in (0, 1):
        await stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1", after_seq=after_seq), metadata=ME)
    await until(lambda: live.ticks > ticks + 1)
    assert live.viewers == []
    await session.events(11)

    async def is_seen() -> bool:
        await session.heartbeat()
        return live.viewers == [viewer]

    await poll.until(is_seen)
    await stub.GetRun(agent_pb2.GetRunRequest(run_id="run_1", after_seq=11), metadata=ME)
    await until(lambda: live.viewers == [viewer] * 2)
    await session.heartbeat()
    ticks = live.ticks
    await until(lambda: live.ticks > ticks + 1)
    assert live.viewers == [viewer] * 2, "once for each change"
    watching.cancel()


@pytest.mark.parametrize("error", [Overloaded, Internal])
async def test_temporary_ledger_failure_does_not_end_a_stream(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, live: FakeLive, error: type[PawlError]
) -> None:
    watching = asyncio.create_task(watch(stub))
    await until(lambda: live.subscriber_count and ledger.reads)
    live.connected = False
    list_events, failures = ledger.list_events, itertools.count()

    async def fail(*_: Any) -> None:
        next(failures)
        raise error

    ledger.list_events = fail  # type: ignore[method-assign, assignment]
    await ledger.finish()
    await until(lambda: next(failures) > 3)
    ledger.list_events = list_events  # type: ignore[method-assign]
    assert await watching == log(ledger)


async def test_silent_run_sends_heartbeats(stub: AgentServiceAsyncStub, ledger: PlayedLedger) -> None:
    """EVT-3: by default, both kinds of watches send a heartbeat every 15 seconds."""
    stream = stub.WatchRun(agent_pb2.WatchRunRequest(run_id="run_1"), metadata=ME)
    counts: list[int] = []
    while not any(counts) or counts[-2:] != [0, 0]:  # A heartbeat may also come earlier, while the log is read
        response: Any = await stream.read()
        counts.append(len(response.events))
    assert sum(counts) == 1
    stream.cancel()
    assert HEARTBEAT_SECONDS == SessionTimes().heartbeat_seconds == 15.0


@pytest.mark.parametrize(("count", "text"), [(BEHIND_EVENTS_MAX + 60, "x"), (30, "x" * 64 * 1024)])
async def test_slow_watcher_is_disconnected_during_a_write(
    ledger: PlayedLedger, watches: Watches, count: int, text: str
) -> None:
    """EVT-3: unread events are limited by number and by bytes. Other watchers continue."""
    stuck = asyncio.Event()
    seen: list[int] = []

    async def slow() -> None:
        async with watches.open(CALLER, RunId("run_1"), 0) as watcher:
            async for event in watcher.events():
                assert isinstance(event, event_pb2.RunEvent)
                if event.seq == 3:
                    stuck.set()
                    await asyncio.Event().wait()

    async def fast() -> None:
        async with watches.open(CALLER, RunId("run_1"), 0) as watcher:
            async for event in watcher.events():
                assert isinstance(event, event_pb2.RunEvent)
                seen.append(event.seq)

    slow_task, fast_task = asyncio.create_task(slow()), asyncio.create_task(fast())
    await until(lambda: seen == [1])
    await ledger.append(count=2)
    await stuck.wait()
    for _ in range(count):
        await ledger.append(text=text)
        await asyncio.sleep(0)
    assert (await raises(SlowConsumer, slow_task)).metadata["resume_after_seq"] == "2"
    await ledger.finish()
    await fast_task
    assert (seen, watches.feed_count) == (list(range(1, count + 5)), 0)


@pytest.mark.parametrize(("count", "text"), [(BEHIND_EVENTS_MAX + 60, "x"), (30, "x" * 64 * 1024)])
@pytest.mark.parametrize("is_writing", [False, True])
async def test_large_commit_does_not_disconnect_current_watchers(
    ledger: PlayedLedger, live: FakeLive, count: int, text: str, is_writing: bool
) -> None:
    """EVT-3: neither a watcher that has all earlier events, nor one that is sending the last of them."""
    held: list[event_pb2.RunEvent] = []
    published = asyncio.Event()
    publish = live.publish
    seen: list[int] = []

    async def hold(*events: event_pb2.RunEvent) -> None:
        held.extend(events)

    async def watch() -> None:
        async with (
            Watches(ledger=ledger, live=live, poll_seconds=3600) as watches,
            watches.open(CALLER, RunId("run_1"), 0) as watcher,
        ):
            async for event in watcher.events():
                assert isinstance(event, event_pb2.RunEvent)
                seen.append(event.seq)
                if event.seq == 2 and is_writing:
                    await published.wait()
            assert not watcher.cut

    watching = asyncio.create_task(watch())
    await until(lambda: seen == [1])
    await ledger.append()
    await until(lambda: seen == [1, 2])
    live.publish = hold  # type: ignore[method-assign]
    await ledger.append(count=count, text=text)
    await publish(*held)
    published.set()
    if is_writing:
        await until(lambda: len(seen) == count + 2)
    live.publish = publish  # type: ignore[method-assign]
    await ledger.finish()
    await watching
    assert seen == list(range(1, count + 4))


async def test_watcher_of_past_events_is_never_disconnected(ledger: PlayedLedger, watches: Watches) -> None:
    """Past events are read in pages at the client's pace, however fast the run writes."""
    await ledger.append(count=100)
    seen: list[int] = []
    async with watches.open(CALLER, RunId("run_1"), 0) as watcher:
        async for event in watcher.events():
            assert isinstance(event, event_pb2.RunEvent)
            seen.append(event.seq)
            if event.seq <= 100:
                await ledger.append(count=5)
            if event.seq == 601:
                await ledger.finish()
    assert seen == list(range(1, 603))


async def test_trimmed_log_is_shown_as_a_gap_and_the_remaining_events(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger
) -> None:
    """EVT-1, I7: all watchers see the same, from any position."""
    await ledger.append(count=5)
    await ledger.finish()
    ledger.trim(to_seq=4)

    async def answers(after_seq: int) -> list[agent_pb2.WatchRunResponse]:
        request = agent_pb2.WatchRunRequest(run_id="run_1", after_seq=after_seq)
        return [answer async for answer in stub.WatchRun(request, metadata=ME)]

    events = ledger.log()
    rest = [agent_pb2.WatchRunResponse(events=events[4:])]
    for after_seq in range(4):
        gap = agent_pb2.WatchRunResponse(gap=ledger.gap("run_1", after_seq))
        assert list(await asyncio.gather(answers(after_seq), answers(after_seq))) == [[gap, *rest]] * 2
    assert (await answers(4), await answers(5)) == (rest, [agent_pb2.WatchRunResponse(events=events[5:])])


@pytest.mark.parametrize("pauses", range(4))
async def test_a_client_that_leaves_at_the_last_moment_stops_its_feed(
    ledger: PlayedLedger, watches: Watches, live: FakeLive, pauses: int
) -> None:
    """I19: the client's stream is cancelled while the feed is being stopped."""

    async def watch() -> None:
        async with watches.open(CALLER, RunId("run_1"), 0) as watcher:
            async for _ in watcher.events():
                pass

    watching = asyncio.create_task(watch())
    await until(lambda: live.subscriber_count and ledger.reads)
    watching.cancel()
    for _ in range(pauses):
        await asyncio.sleep(0)
    watching.cancel()
    await asyncio.wait([watching])
    await until(lambda: watches.feed_count == 0 and live.subscriber_count == 0)
