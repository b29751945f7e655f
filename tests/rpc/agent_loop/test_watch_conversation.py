"""WatchConversation: first the current state, then changes; each caller gets only what the reads would return."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from pawl.agent.v1 import agent_pb2, jobs_pb2
from pawl.agent.v1 import conversation_pb2 as pb
from pawl.agent_loop.api.feed import BEHIND_EVENTS_MAX
from pawl.agent_loop.conversations import watch
from pawl.agent_loop.conversations.cursor import Cursor
from pawl.agent_loop.wiring import ClientSide
from pawl.chassis.ids import ConversationId, RunId
from pawl.errors import SlowConsumer
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.values import RunState
from tests.fakes.manual_clock import ManualClock
from tests.fakes.session_agent import FakeLive
from tests.rpc.agent_loop.conftest import ME, OTHER_USERS
from tests.rpc.agent_loop.ledger import ME as CALLER
from tests.rpc.agent_loop.ledger import PlayedLedger
from tests.rpc.agent_loop.test_jobs import add_job
from tests.rpc.refusals import reason_of
from tests.rpc.stubs import AgentServiceAsyncStub, ConversationServiceAsyncStub

YOU = OTHER_USERS[0]
pytestmark = pytest.mark.usefixtures("run")


@dataclass
class Seen:
    """What a client has received from one stream or, with `after`, from several."""

    cursor: str = ""
    caught_up: int = 0
    heartbeats: int = 0
    conversation: conversation_pb2.Conversation = field(default_factory=conversation_pb2.Conversation)
    numbers: list[int] = field(default_factory=list)
    runs: dict[str, run_pb2.Run] = field(default_factory=dict)
    jobs: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, int]] = field(default_factory=list)
    gaps: list[pb.ConversationGap] = field(default_factory=list)

    @property
    def states(self) -> dict[str, int]:
        return {run_id: run.state for run_id, run in self.runs.items()}

    def take(self, response: pb.WatchConversationResponse) -> None:
        self.cursor = response.cursor or self.cursor
        self.caught_up += response.caught_up
        self.heartbeats += not response.ByteSize()
        if response.HasField("gap"):
            self.gaps.append(response.gap)
        for item in response.items:
            match item.WhichOneof("kind"):
                case "conversation":
                    self.conversation = item.conversation
                case "message":
                    self.numbers.append(item.message.number)
                case "run":
                    self.runs[item.run.run_id] = item.run
                case "job":
                    self.jobs[item.job.job_id] = item.job
        self.events += [(event.run_id, event.seq) for event in response.events]


class Stream:
    def __init__(self, call: Any, seen: Seen) -> None:
        self.seen = seen
        self.keep: list[bytes] = []
        self._call = call

    async def until(self, condition: Callable[[Seen], object]) -> None:
        async with asyncio.timeout(60):
            while not condition(self.seen):
                response = await self._call.read()
                assert response is not grpc.aio.EOF
                self.keep.append(response.SerializeToString())
                self.seen.take(response)

    async def end(self) -> str:
        """Return the reason with which the server ends the stream."""
        return await reason_of(self.until(lambda _: False))


@pytest.fixture
def follow(conversations: ConversationServiceAsyncStub) -> Any:
    @asynccontextmanager
    async def follow(
        metadata: Any = ME, after: Seen | None = None, cursor: str = "", *, caught_up: bool = False
    ) -> AsyncIterator[Stream]:
        request = pb.WatchConversationRequest(
            conversation_id="conv_1", after=cursor or (after.cursor if after is not None else "")
        )
        call: Any = conversations.WatchConversation(request, metadata=metadata)
        stream = Stream(call, after or Seen())
        try:
            if caught_up:
                await stream.until(lambda seen: seen.caught_up)
            yield stream
        finally:
            call.cancel()

    return follow


@pytest.fixture(autouse=True)
async def reports(clients: ClientSide, live: FakeLive) -> AsyncIterator[None]:
    """Changes are reported, and versions are compared only when a test asks for it."""
    following = asyncio.create_task(clients.conversations.follow(live))
    yield
    following.cancel()


@pytest.fixture
def brief_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROGRESS_SECONDS", 0.05)


async def share(
    conversations: ConversationServiceAsyncStub, sharing: conversation_pb2.Sharing.ValueType, *, arguments: bool = True
) -> None:
    request = pb.UpdateConversationRequest(conversation_id="conv_1", sharing=sharing, shows_arguments=arguments)
    await conversations.UpdateConversation(request, metadata=ME)


async def test_stream_starts_with_the_current_state_and_continues_with_changes(
    follow: Any, ledger: PlayedLedger, brief_pauses: None
) -> None:
    await add_job(ledger, 1)
    ledger.put_background("conv_1", "job_1")
    await ledger.add_call("call_1", call_pb2.CALL_STATE_AWAITING_APPROVAL)
    async with follow(caught_up=True) as stream:
        seen = stream.seen
        assert seen.conversation.active_run_id == "run_1"
        assert [call.call_id for call in seen.runs["run_1"].pending_calls] == ["call_1"]
        assert seen.jobs.keys() == {"job_1"}
        await stream.until(lambda seen: seen.events[-1:] == [("run_1", ledger.last_seq())])
        assert seen.events == [("run_1", seq) for seq in range(1, ledger.last_seq() + 1)]
        await ledger.settle("call_1")
        await stream.until(lambda seen: not seen.runs["run_1"].pending_calls)
        await ledger.change("job_1", RunState.WAITING)
        await stream.until(lambda seen: seen.jobs["job_1"].state == run_pb2.RUN_STATE_WAITING)
        await ledger.finish()
        await stream.until(
            lambda seen: (
                seen.states.get("run_1") == run_pb2.RUN_STATE_COMPLETED
                and seen.events[-1] == ("run_1", ledger.last_seq())
                and not seen.conversation.active_run_id
            )
        )
        assert seen.events == [("run_1", seq) for seq in range(1, ledger.last_seq() + 1)]
        await stream.until(lambda seen: seen.heartbeats)


async def test_a_run_that_ends_before_it_is_noticed_is_streamed_too(
    follow: Any, ledger: PlayedLedger, stub: AgentServiceAsyncStub, clock: ManualClock
) -> None:
    async with follow(caught_up=True) as stream:
        await ledger.finish()
        await stream.until(lambda seen: seen.states.get("run_1") == run_pb2.RUN_STATE_COMPLETED)
        await clock.advance(1)
        started = await stub.StartRun(agent_pb2.StartRunRequest(conversation_id="conv_1", text="Hello"), metadata=ME)
        run_id = started.run.run_id
        await ledger.change(run_id, RunState.RUNNING)
        await ledger.finish(run_id)
        await stream.until(lambda seen: seen.states.get(run_id) == run_pb2.RUN_STATE_COMPLETED)
        last_seq = stream.seen.runs[run_id].last_seq
        await stream.until(lambda seen: seen.events[-1] == (run_id, last_seq))
        assert [seq for of, seq in stream.seen.events if of == run_id] == list(range(1, last_seq + 1))


async def test_reconnected_stream_continues_after_its_cursor(
    follow: Any, ledger: PlayedLedger, stub: AgentServiceAsyncStub
) -> None:
    await ledger.append(count=3)
    async with follow() as stream:
        await stream.until(lambda seen: ("run_1", 4) in seen.events)
    await ledger.append(count=2)
    await ledger.finish()
    await stub.StartRun(agent_pb2.StartRunRequest(conversation_id="conv_1", text="Hello"), metadata=ME)
    async with follow(after=stream.seen) as again:
        await again.until(lambda seen: seen.states.get("run_1") == run_pb2.RUN_STATE_COMPLETED)
        await again.until(lambda seen: ("run_1", 7) in seen.events and seen.events[-1][0] != "run_1")
        assert [seq for run_id, seq in again.seen.events if run_id == "run_1"] == list(range(1, 8))
        assert again.seen.numbers == [1]


async def test_a_client_that_loses_its_connection_again_gets_the_events_of_all_runs_in_between(
    follow: Any, ledger: PlayedLedger, stub: AgentServiceAsyncStub, clock: ManualClock
) -> None:
    async with follow() as stream:
        await stream.until(lambda seen: seen.events)
    await ledger.finish()
    seen, runs = stream.seen, list[str]()
    for text in ("one", "two", "three"):
        await clock.advance(1)
        started = await stub.StartRun(agent_pb2.StartRunRequest(conversation_id="conv_1", text=text), metadata=ME)
        runs.append(started.run.run_id)
        await ledger.finish(runs[-1])
    has_all = False
    while not has_all:
        # Longer than the cursor's time goes back.
        await clock.advance(60)
        async with follow(after=seen) as again:
            events = len(seen.events)
            await again.until(lambda seen, events=events: len(seen.events) > events or seen.heartbeats)
            has_all = len(seen.events) == events
    for run_id in runs:
        assert [seq for of, seq in seen.events if of == run_id] == list(range(1, ledger.runs[run_id].run.last_seq + 1))


async def test_change_reads_only_what_has_changed(follow: Any, ledger: PlayedLedger) -> None:
    jobs = [f"job_{number}" for number in range(10)]
    for number in range(10):
        await add_job(ledger, number)
    ledger.put_background("conv_1", *jobs)
    async with follow(caught_up=True) as stream:
        assert stream.seen.jobs.keys() == set(jobs)
        ledger.run_reads.clear()
        await ledger.change("job_3", RunState.CANCELLING)
        await stream.until(lambda seen: seen.jobs["job_3"].state == run_pb2.RUN_STATE_CANCELLING)
        await ledger.finish()
        await stream.until(lambda seen: seen.states.get("run_1") == run_pb2.RUN_STATE_COMPLETED)
        assert set(ledger.run_reads) <= {"job_3", "run_1"}
        assert len(ledger.run_reads) <= 4


async def test_events_of_a_run_continue_long_after_its_end(
    follow: Any, ledger: PlayedLedger, clock: ManualClock
) -> None:
    await ledger.append(count=3)
    await ledger.finish()
    await clock.advance(60)
    now = Cursor(microseconds=int(clock.now() * 1e6), run_id=RunId("run_1"), seq=2)
    async with follow(cursor=now.encode(CALLER, ConversationId("conv_1"))) as stream:
        last_seq = ledger.last_seq()
        await stream.until(lambda seen: seen.events[-1:] == [("run_1", last_seq)] or seen.heartbeats)
        assert stream.seen.events == [("run_1", seq) for seq in range(3, last_seq + 1)]


async def test_a_resting_run_is_followed_again_when_it_continues(follow: Any, ledger: PlayedLedger) -> None:
    async with follow() as stream:
        await ledger.change("run_1", RunState.WAITING)
        await stream.until(lambda seen: seen.events[-1:] == [("run_1", 2)])
        await ledger.append()
        await ledger.change("run_1", RunState.RUNNING)
        await stream.until(lambda seen: seen.events[-1:] == [("run_1", 4)])
        await ledger.append()
        await stream.until(lambda seen: seen.events == [("run_1", seq) for seq in range(1, 6)])


@pytest.mark.parametrize("reported", [True, False])
async def test_a_lost_change_report_is_made_up_for(
    follow: Any, ledger: PlayedLedger, clients: ClientSide, live: FakeLive, *, reported: bool
) -> None:
    """By comparing versions, or, if NATS is unavailable, by reading all watched conversations."""
    async with follow(caught_up=True) as stream:
        live.conversations.clear()
        await ledger.finish()
        await clients.conversations._find_changes(reported=reported)
        await stream.until(lambda seen: seen.states.get("run_1") == run_pb2.RUN_STATE_COMPLETED)


async def test_a_job_that_only_makes_progress_is_sent_at_most_once_a_second(
    follow: Any, ledger: PlayedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PROGRESS_SECONDS", 3600.0)
    await add_job(ledger, 1)
    ledger.put_background("conv_1", "job_1")
    async with follow(caught_up=True) as stream:
        ledger.put_run("job_1", trimmed_rounds=5)
        await ledger.append("job_1")
        await ledger.change("run_1", RunState.WAITING)
        await stream.until(lambda seen: seen.states.get("run_1") == run_pb2.RUN_STATE_WAITING)
        assert stream.seen.jobs["job_1"].iterations == 0
        await ledger.change("job_1", RunState.CANCELLING)
        await stream.until(lambda seen: seen.jobs["job_1"].state == run_pb2.RUN_STATE_CANCELLING)
        assert stream.seen.jobs["job_1"].iterations == 5


async def test_stream_ends_when_sharing_ends(follow: Any, conversations: ConversationServiceAsyncStub) -> None:
    await share(conversations, conversation_pb2.SHARING_READ)
    async with follow(YOU, caught_up=True) as stream:
        await share(conversations, conversation_pb2.SHARING_PRIVATE)
        assert await stream.end() == "CONVERSATION_NOT_FOUND"


@pytest.mark.parametrize("metadata", OTHER_USERS)
async def test_unshared_conversation_is_not_found(follow: Any, metadata: Any) -> None:
    async with follow(metadata) as stream:
        assert await stream.end() == "CONVERSATION_NOT_FOUND"


async def test_bad_cursors_are_refused(follow: Any, conversations: ConversationServiceAsyncStub) -> None:
    async with follow() as stream:
        await stream.until(lambda seen: seen.events)
    await share(conversations, conversation_pb2.SHARING_READ)
    for metadata, cursor in ((YOU, stream.seen.cursor), (ME, stream.seen.cursor[:-6]), (ME, "?"), (ME, "A" * 600)):
        async with follow(metadata, cursor=cursor) as again:
            assert await again.end() == "INVALID_FIELD"


async def test_cursor_beyond_the_end_is_refused(follow: Any, ledger: PlayedLedger) -> None:
    await ledger.append(count=3)
    async with follow() as stream:
        await stream.until(lambda seen: ("run_1", 4) in seen.events)
    ledger.put_run("run_1", last_seq=2)
    async with follow(after=stream.seen) as again:
        assert await again.end() == "SEQ_BEYOND_END"


async def test_slow_reader_is_disconnected_and_can_continue(
    follow: Any, ledger: PlayedLedger, clients: ClientSide
) -> None:
    seen = Seen()
    request = pb.WatchConversationRequest(conversation_id="conv_1")
    async with aclosing(clients.conversations.watch(CALLER, request)) as responses:
        for seq in (1, 2):
            while seen.events[-1:] != [("run_1", seq)]:
                seen.take(await anext(responses))
            await ledger.append()
        # The stream has reached the live events.
        for _ in range(BEHIND_EVENTS_MAX + 5):
            await ledger.append()
            await asyncio.sleep(0)
        with pytest.raises(SlowConsumer):
            async for response in responses:
                seen.take(response)
    async with follow(after=seen) as again:
        await again.until(lambda seen: seen.events[-1] == ("run_1", ledger.last_seq()))
        assert again.seen.events == [("run_1", seq) for seq in range(1, ledger.last_seq() + 1)]


async def test_a_gap_names_the_first_message_and_replaces_deleted_events(
    follow: Any, ledger: PlayedLedger, stub: AgentServiceAsyncStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.append(count=3)
    ledger.trim(to_seq=2)
    async with follow() as stream:
        await stream.until(lambda seen: ("run_1", 4) in seen.events)
        (gap,) = stream.seen.gaps
        assert (gap.events.from_seq, gap.events.to_seq, gap.first_message_number) == (1, 2, 0)
        assert stream.seen.events == [("run_1", 3), ("run_1", 4)]
    await ledger.finish()
    for text in ("one", "two", "three"):
        started = await stub.StartRun(agent_pb2.StartRunRequest(conversation_id="conv_1", text=text), metadata=ME)
        await ledger.finish(started.run.run_id)
    monkeypatch.setattr(watch, "MESSAGES_MAX", 2)
    async with follow(caught_up=True) as stream:
        assert (stream.seen.numbers, stream.seen.gaps[0].first_message_number) == ([2, 3], 2)


SECRET = b"zebra"


async def every_read(channel: grpc.aio.Channel, metadata: Any) -> bytes:
    """Return what all methods that only read give to a user about the conversation, its run and its job."""
    found = b""
    named = {"conversation_id": "conv_1", "run_id": "job_1", "job_id": "job_1", "call_id": "call_of_job_1"}
    for method in READING:
        fields = {name: value for name, value in named.items() if name in method.input_type.fields_by_name}
        for wanted in (fields, {**fields, "run_id": "run_1"} if "run_id" in fields else {}):
            request = GetMessageClass(method.input_type)(**wanted).SerializeToString()
            behaviour: Any = channel.unary_stream(f"/{method.containing_service.full_name}/{method.name}")
            call = behaviour(request, metadata=metadata)
            with suppress(grpc.aio.AioRpcError):  # Most of it does not exist for this user.
                # A stream that starts with a complete list does so in its first response.
                found += await call.read() or b""
            call.cancel()
    return found


READING = [
    method
    for file in (agent_pb2.DESCRIPTOR, pb.DESCRIPTOR, jobs_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
    if method.name.startswith(("Get", "List", "Watch", "Preview"))
]


@pytest.mark.parametrize("seed", range(5))
async def test_second_user_never_receives_another_users_job(
    follow: Any, ledger: PlayedLedger, conversations: ConversationServiceAsyncStub, channel: grpc.aio.Channel, seed: int
) -> None:
    """ASYNC-5: no read or stream shows the job, whatever is shared and whatever happens to the job."""
    choose = random.Random(seed)
    await add_job(ledger, 1)
    ledger.put_run("job_1", options=run_pb2.Run(job=run_pb2.Job(tool_name=SECRET.decode())).SerializeToString())
    ledger.put_background("conv_1", "job_1")
    await share(conversations, conversation_pb2.SHARING_READ)
    async with follow(YOU, caught_up=True) as stream:
        for number in range(12):
            match choose.randrange(5):
                case 0:
                    await ledger.change("job_1", choose.choice([RunState.RUNNING, RunState.WAITING]))
                case 1:
                    name = f"call_of_job_{number}"
                    await ledger.add_call(
                        name, call_pb2.CALL_STATE_AWAITING_APPROVAL, run_id="job_1", arguments=SECRET, tool_name="zebra"
                    )
                case 2:
                    await ledger.append("job_1", text=SECRET.decode())
                case 3:
                    ledger.add_notice("conv_1", SECRET.decode())
                    await ledger.append()
                case _:
                    sharing = choose.choice([conversation_pb2.SHARING_READ, conversation_pb2.SHARING_WRITE])
                    await share(conversations, sharing, arguments=choose.random() < 0.5)
        assert SECRET in await every_read(channel, ME)
        assert SECRET not in await every_read(channel, YOU)
        await share(conversations, conversation_pb2.SHARING_PRIVATE)
        assert await stream.end() == "CONVERSATION_NOT_FOUND"
    assert SECRET not in b"".join(stream.keep)
    assert (stream.seen.jobs, stream.seen.runs, stream.seen.events) == ({}, {}, [])
