"""Streams of conversations: first the current state, then changes.

There is no log of changes. When NATS reports a change, a stream reads everything that changed since its last read. It
reads with its caller's rights, using the code of GetConversation, ListMessages, GetRun and GetJob, and sends nothing
that these methods would not return. It sends only items that differ from those already sent.

All streams share one subscription, and one periodic read of versions that finds changes missed by NATS. An idle stream
reads nothing while NATS is available.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf.message import Message as ProtoMessage
from msgspec.structs import replace

from pawl.agent.v1.conversation_pb2 import (
    ConversationGap,
    ConversationItem,
    WatchConversationRequest,
    WatchConversationResponse,
)
from pawl.agent.v1.jobs_pb2 import BackgroundJob
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.agent_loop.api.watch import Watches
from pawl.agent_loop.conversations.cursor import Cursor
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, RunId, StoreId, check_id
from pawl.chassis.process import logs, tasks
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import PawlError, RunNotFound, SeqBeyondEnd
from pawl.event.v1.event_pb2 import RunEvent
from pawl.event.v1.gap_pb2 import Gap
from pawl.event.v1.run_pb2 import Run
from pawl.job.v1.ledger_pb2 import ListChangesRequest, ListChangesResponse
from pawl.values import ENDED, RESTING, RunState

HEARTBEAT_SECONDS: Final = 30.0
# Maximum number of the newest messages that a stream sends.
MESSAGES_MAX: Final = 500
# Minimum time between two reads of one stream.
PAUSE_SECONDS: Final = 0.2
# Minimum time between two updates of a job that has only made progress.
PROGRESS_SECONDS: Final = 1.0
VERSIONS_SECONDS: Final = 3.0
VERSIONS_MAX: Final = 1000
# Maximum number of streams that read concurrently.
READERS_MAX: Final = 32
# How long after its timestamp a transaction may commit: longer than any statement or transaction may take.
_LATE_MICROSECONDS: Final = 30_000_000
_PART_BYTES_MAX: Final = 1024 * 1024
# Fields of a run that change with its output.
_VOLATILE: Final = ("last_seq", "update_time", "active_seconds")

_Key: TypeAlias = tuple[StoreId, ConversationId]

_log = logs.get_logger(__name__)


class ConversationWatches:
    """All watchers of conversations on this replica."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        watches: Watches,
        clock: Clock,
        job: Callable[[Run], BackgroundJob],
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self.ledger = ledger
        self.watches = watches
        self.clock = clock
        self.job = job
        self.heartbeat_seconds = heartbeat_seconds
        self.readers = asyncio.Semaphore(READERS_MAX)
        # Streams by the conversations that they show: their own, and those of its jobs and child runs.
        self._streams: defaultdict[_Key, set[_Stream]] = defaultdict(set)
        self._watched: Counter[_Key] = Counter()
        self._versions: dict[_Key, str] = {}

    async def follow(self, live: BusEvents) -> None:
        """Notify streams of changes, including those that `live` fails to report. Never returns."""
        await live.subscribe_conversations(self._changed)
        was_connected = False
        while True:
            await self.clock.sleep(VERSIONS_SECONDS)
            connected = live.connected
            try:
                await self._find_changes(reported=connected and was_connected)
            except PawlError as error:
                _log.info("conversations.versions_unavailable", reason=error.reason)
            was_connected = connected

    async def watch(
        self, caller: Principal, request: WatchConversationRequest
    ) -> AsyncGenerator[WatchConversationResponse, None]:
        """Yield the responses of WatchConversation. Use it inside `contextlib.aclosing`.

        Raises:
            InvalidId, InvalidField, ConversationNotFound, ConversationErased, SeqBeyondEnd, SlowConsumer, Overloaded
        """
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        cursor = Cursor.decode(request.after, caller, conversation_id)
        key = (caller.store_id, conversation_id)
        stream = _Stream(self, caller, conversation_id, cursor)
        self.show(stream, {conversation_id})
        self._watched[key] += 1
        try:
            async with aclosing(stream.responses()) as responses:
                async for response in responses:
                    yield response
                    del response  # Otherwise, a stream that waits for hours would hold the response in memory.
        finally:
            self._watched[key] -= 1
            if not self._watched[key]:
                del self._watched[key]
            self.show(stream, set())
            await stream.end()

    def show(self, stream: _Stream, conversation_ids: set[ConversationId]) -> None:
        """From now on, notify the stream only of changes in these conversations."""
        store_id = stream.caller.store_id
        for conversation_id in conversation_ids - stream.shown:
            self._streams[store_id, conversation_id].add(stream)
        for conversation_id in stream.shown - conversation_ids:
            streams = self._streams[store_id, conversation_id]
            streams.discard(stream)
            if not streams:
                del self._streams[store_id, conversation_id]
        stream.shown = conversation_ids

    def _changed(self, store_id: StoreId, conversation_id: ConversationId) -> None:
        for stream in self._streams.get((store_id, conversation_id), ()):
            stream.change()

    async def _find_changes(self, *, reported: bool) -> None:
        """Notify streams whose conversations have a new version, or all streams if NATS does not report changes."""
        if not reported:
            for key in list(self._watched):
                self._changed(*key)
            return
        keys, before = list(self._watched), self._versions
        self._versions = {key: version for key, version in before.items() if key in self._watched}
        for first in range(0, len(keys), VERSIONS_MAX):
            part = keys[first : first + VERSIONS_MAX]
            for key, version in zip(part, await self.ledger.list_versions(part), strict=True):
                if before.get(key) != version:
                    self._versions[key] = version
                    self._changed(*key)


class _Sent(NamedTuple):
    """The state of a run that was last sent to a stream, and when. A run with an unchanged `version` is unchanged."""

    version: str
    digest: int
    state: int
    sent_at: float


class _Followed(NamedTuple):
    """A run whose events the stream must send. Includes its start time and its last known seq and state."""

    began_microseconds: int
    last_seq: int
    state: int


class _Stream:
    """One client's stream. It is notified of changes in the conversations in `shown`."""

    def __init__(
        self, around: ConversationWatches, caller: Principal, conversation_id: ConversationId, cursor: Cursor
    ) -> None:
        self.caller = caller
        self.shown: set[ConversationId] = set()
        self._around = around
        self._conversation_id = conversation_id
        self._cursor = cursor
        self._woken = asyncio.Event()
        self._has_changed = False
        self._read_at = 0.0
        # The client has the events of all runs that started by this time.
        self._start_microseconds = 0
        self._conversation = 0
        self._sent: dict[RunId, _Sent] = {}
        self._followed: dict[RunId, _Followed] = {}
        self._follower: asyncio.Task[None] | None = None
        # Events for the client, and a signal that it has received them.
        self._events: tuple[RunId, list[RunEvent] | Gap, asyncio.Event] | None = None

    def change(self) -> None:
        """Schedule another read of the conversation."""
        self._has_changed = True
        self._woken.set()

    async def end(self) -> None:
        if self._follower is not None:
            await tasks.end([self._follower])

    async def responses(self) -> AsyncGenerator[WatchConversationResponse, None]:
        async with aclosing(self._changes(is_first=True)) as changes:
            async for response in changes:
                yield response
                del response
        yield self._response(caught_up=True)
        while True:
            if self._events is not None:
                run_id, events, received = self._events
                yield self._response_of(run_id, events)
                self._events = None
                received.set()
                del events
            elif self._follower_has_ended():
                continue
            elif self._has_changed and self._pause() <= 0:
                async with aclosing(self._changes(is_first=False)) as changes:
                    async for response in changes:
                        yield response
                        del response
            elif not await self._wait():
                yield WatchConversationResponse()

    def _pause(self) -> float:
        return self._read_at + PAUSE_SECONDS - asyncio.get_running_loop().time()

    async def _wait(self) -> bool:
        """Wait until there may be something to send. Return False when a heartbeat is due."""
        self._woken.clear()
        seconds = self._pause() if self._has_changed else self._around.heartbeat_seconds
        return bool(await tasks.within(seconds, self._woken.wait())) or self._has_changed

    def _response(self, **fields: Any) -> WatchConversationResponse:
        # A client that resumes from this cursor also needs the events of followed runs that have not been sent yet.
        waiting = [each.began_microseconds - 1 for id_, each in self._followed.items() if id_ != self._cursor.run_id]
        cursor = replace(self._cursor, microseconds=min([self._cursor.microseconds, *waiting]))
        return WatchConversationResponse(cursor=cursor.encode(self.caller, self._conversation_id), **fields)

    def _response_of(self, run_id: RunId, events: list[RunEvent] | Gap) -> WatchConversationResponse:
        if isinstance(events, Gap):
            self._cursor = replace(self._cursor, run_id=run_id, seq=events.to_seq)
            return self._response(gap=ConversationGap(events=events))
        self._cursor = replace(self._cursor, run_id=run_id, seq=events[-1].seq)
        return self._response(events=events)

    async def _changes(self, *, is_first: bool) -> AsyncGenerator[WatchConversationResponse, None]:
        """Read the changes, and yield everything that the client does not have yet."""
        self._has_changed, self._read_at = False, asyncio.get_running_loop().time()
        found = await self._read(is_first=is_first)
        last_number = found.conversation.last_message_number
        if is_first and last_number < self._cursor.number:
            raise SeqBeyondEnd(last_seq=last_number)
        self._start_microseconds = self._start_microseconds or self._cursor.microseconds or found.time.ToMicroseconds()
        # Do this before reading the runs, so that none of their later changes are missed.
        self._around.show(self, set(map(ConversationId, found.conversation_ids)))
        async with aclosing(self._pages(found)) as pages:
            async for response in pages:
                yield response
        versions = dict(zip(found.run_ids, found.versions, strict=True))
        if is_first and self._cursor.run_id:
            # The client may lack events of this run even if it ended long ago. Later runs are compared with it.
            versions = {self._cursor.run_id: ""} | versions
        read = [
            await self._run(RunId(run_id), version, is_active=run_id == found.active_run_id)
            for run_id, version in versions.items()
        ]
        items = [item for item in read if item is not None]
        if any((item.run.state or item.job.state) in ENDED for item in items):
            # The client gets a run's messages before its end.
            async with aclosing(self._pages(await self._read(is_first=False))) as pages:
                async for response in pages:
                    yield response
        self._sent = {
            run_id: sent for run_id, sent in self._sent.items() if sent.state not in ENDED or run_id in versions
        }
        parts = list(in_parts(items, ConversationItem.ByteSize, size_max=_PART_BYTES_MAX))
        for part in parts[:-1]:
            yield self._response(items=part)
        self._cursor = replace(self._cursor, microseconds=found.time.ToMicroseconds())
        for part in parts[-1:]:
            yield self._response(items=part)

    async def _pages(self, page: ListChangesResponse) -> AsyncGenerator[WatchConversationResponse, None]:
        """Yield the conversation if it has changed, and its new messages.

        `page` contains the first of these messages.
        """
        while True:
            if (response := self._messages(page)) is not None:
                yield response
            if not page.has_more:
                return
            page = await self._read(is_first=False)

    async def _read(self, *, is_first: bool) -> ListChangesResponse:
        request = ListChangesRequest(
            conversation_id=self._conversation_id,
            messages_max=MESSAGES_MAX,
            all_open=is_first,
            after_number=self._cursor.number,
        )
        if self._cursor.microseconds:
            request.since_time.FromMicroseconds(max(0, self._cursor.microseconds - _LATE_MICROSECONDS))
        async with self._around.readers:
            return await self._around.ledger.list_changes(self.caller, request)

    def _messages(self, page: ListChangesResponse) -> WatchConversationResponse | None:
        """Return a response with the conversation (if it has changed) and a page of new messages."""
        items, digest = [], _digest(page.conversation)
        if digest != self._conversation:
            self._conversation = digest
            items.append(ConversationItem(conversation=page.conversation))
        items += [ConversationItem(message=message) for message in page.messages]
        gap = None
        if page.messages:
            if page.messages[0].number > self._cursor.number + 1:
                gap = ConversationGap(first_message_number=page.messages[0].number)
            self._cursor = replace(self._cursor, number=page.messages[-1].number)
        return self._response(items=items, gap=gap) if items else None

    async def _run(self, run_id: RunId, version: str, *, is_active: bool) -> ConversationItem | None:
        """Return a run or job, or None if the client already has its current state."""
        sent = self._sent.get(run_id)
        if sent is not None and version and sent.version == version:
            return None
        try:
            async with self._around.readers:
                run = await self._around.ledger.get_run(self.caller, run_id)
        except RunNotFound:  # The run was removed.
            return None
        if run_id == self._cursor.run_id:
            self._start_microseconds = _began_microseconds(run)
        if is_active or run_id == self._cursor.run_id or self._has_begun(run, sent):
            self._follow(run_id, run)
        if run.reports_to_conversation_id:
            item = ConversationItem(job=self._around.job(run))
        else:
            item = ConversationItem(run=convert.run_message(run))
        for field in _VOLATILE:
            run.ClearField(field)
        digest, now = _digest(item.job if item.HasField("job") else run), self._read_at
        if sent is not None:
            if sent.digest == digest:
                self._sent[run_id] = sent._replace(version=version)
                return None
            early = sent.sent_at + PROGRESS_SECONDS - now
            if item.HasField("job") and sent.state == run.state and early > 0:
                asyncio.get_running_loop().call_later(early, self.change)
                return None
        self._sent[run_id] = _Sent(version, digest, run.state, now)
        return item

    def _has_begun(self, run: Run, sent: _Sent | None) -> bool:
        """Return whether the run has started since the last read. It may already have ended."""
        if run.conversation_id != self._conversation_id or RunState(run.state) is RunState.QUEUED:
            return False
        if sent is None:
            return _began_microseconds(run) > self._start_microseconds
        return sent.state == RunState.QUEUED

    def _follow(self, run_id: RunId, run: Run) -> None:
        """Send the run's events that the client does not have yet."""
        seq = self._cursor.seq if self._cursor.run_id == run_id else 0
        if run.last_seq < seq and run_id not in self._followed:
            raise SeqBeyondEnd(last_seq=run.last_seq)
        if run.last_seq > seq or run_id in self._followed:
            self._followed[run_id] = _Followed(_began_microseconds(run), run.last_seq, run.state)
            if self._follower is None or self._follower_has_ended():
                self._follower = asyncio.get_running_loop().create_task(self._send_events(), name="conversation.events")
                self._follower.add_done_callback(lambda _: self._woken.set())

    def _follower_has_ended(self) -> bool:
        """Drop a follower that has ended, and raise its error if there is one."""
        if self._follower is None or not self._follower.done():
            return False
        follower, self._follower = self._follower, None
        follower.result()
        return True

    async def _send_events(self) -> None:
        """Send the events of followed runs, one run at a time, oldest first, until each is parked or has ended."""
        while self._followed:
            run_id = min(self._followed, key=lambda id_: self._followed[id_].began_microseconds)
            try:
                await self._send_events_of(run_id)
            except RunNotFound:
                self._followed.pop(run_id, None)

    async def _send_events_of(self, run_id: RunId) -> None:
        seq, state = self._cursor.seq if self._cursor.run_id == run_id else 0, 0
        async with (
            self._around.watches.open(self.caller, run_id, seq) as watcher,
            aclosing(watcher.pages()) as pages,
        ):
            async for page in pages:
                events = page if isinstance(page, Gap) else list(map(RunEvent.FromString, page))
                await self._send(run_id, events)
                if isinstance(events, Gap):
                    continue
                seq = events[-1].seq
                state = next((each.run_changed.run.state for each in reversed(events) if _is_state(each)), state)
                known = self._followed[run_id]
                if seq >= known.last_seq and (state or known.state) in RESTING - ENDED:
                    break
            # Do this before awaiting anything else, because the run may be followed again from now on.
            del self._followed[run_id]

    async def _send(self, run_id: RunId, events: list[RunEvent] | Gap) -> None:
        received = asyncio.Event()
        self._events = run_id, events, received
        self._woken.set()
        await received.wait()


def _is_state(event: RunEvent) -> bool:
    return event.HasField("run_changed")


def _began_microseconds(run: Run) -> int:
    """Return when a run started. If it never started, return when it ended or else when it was created."""
    named = next((name for name in ("start_time", "end_time") if run.HasField(name)), "create_time")
    microseconds: int = getattr(run, named).ToMicroseconds()
    return microseconds


def _digest(message: ProtoMessage) -> int:
    return hash(message.SerializeToString(deterministic=True))
