"""Streams of pending calls and runs: first a snapshot, then changes.

Pending items are calls waiting for a user and runs that have no tokens left. All streams with the same user, rights and
filter share a *view* and its reads. After its snapshot, a stream reads at most one page per second, so a large inbox
delays only its own streams.

The reader polls when NATS reports a change, and every 15 s in case a report was lost. Without NATS it polls every
second. Callers only share reads that have not started yet, so a page is never older than the request for it. Each view
has at most one read in flight, and slow consumers do not block others.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from pawl.agent.v1.agent_pb2 import WatchPendingResponse
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.live import BusEvents
from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import APPROVERS
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.chassis.process import tasks
from pawl.chassis.process.clock import Clock
from pawl.errors import PermissionDenied
from pawl.event.v1.call_pb2 import Call
from pawl.event.v1.run_pb2 import Run
from pawl.job.v1.ledger_pb2 import ListPendingCallsRequest, ListPendingCallsResponse

# Maximum number of pages that are read concurrently. Other views wait.
READERS_MAX: Final = 64
PAGE_SIZE: Final = 200
# Pauses between polls when NATS reports no change.
FALLBACK_PAUSES: Final = 15


class PendingViews:
    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float) -> None:
        self._ledger = ledger
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._readers = asyncio.Semaphore(READERS_MAX)
        self._views: dict[tuple[Principal, bytes], View] = {}
        # Views by user, and by store (user None).
        self._inboxes: defaultdict[tuple[StoreId, UserId | None], set[View]] = defaultdict(set)
        self._numbers = itertools.count()
        self._follows = False

    async def follow(self, live: BusEvents) -> None:
        """Poll whenever `live` reports a change, and regularly in case a report was lost. Never returns."""
        await live.subscribe_inboxes(self._changed)
        self._follows = True
        was_connected = False
        for tick in itertools.count():
            connected = live.connected
            everyone = not (connected and was_connected)
            was_connected = connected
            for view in self._views.values():
                if everyone or (tick + view.number) % FALLBACK_PAUSES == 0:
                    view.change()
            await self._clock.sleep(self._poll_seconds)

    async def _page(self, reader: Principal, wanted: ListPendingCallsRequest, token: str) -> ListPendingCallsResponse:
        request = ListPendingCallsRequest()
        request.CopyFrom(wanted)
        request.page_size, request.page_token = PAGE_SIZE, token
        return await self._ledger.list_pending(reader, request)

    def _changed(self, store_id: StoreId, user_id: UserId) -> None:
        for view in (*self._inboxes.get((store_id, user_id), ()), *self._inboxes.get((store_id, None), ())):
            view.change()

    @asynccontextmanager
    async def open(self, caller: Principal, wanted: ListPendingCallsRequest) -> AsyncIterator[View]:
        """Watch pending items for the duration of the block.

        Watchers with the same user, rights and filter share a view. The view does not depend on the credential. The
        caller must make sure that the credential stays valid.
        """
        reader = replace(caller, credential_id=CredentialId(""), expires_at=None)
        key = (reader, wanted.SerializeToString(deterministic=True))
        inbox = (caller.store_id, None if wanted.of_all_users else caller.user_id)
        view = self._views.get(key)
        if view is None:
            read, rest = partial(self._page, reader, wanted), partial(self._clock.sleep, self._poll_seconds)
            view = self._views[key] = View(
                read, rest, self._readers, number=next(self._numbers), waits=lambda: self._follows
            )
            self._inboxes[inbox].add(view)
        view.watchers += 1
        try:
            yield view
        finally:
            view.watchers -= 1
            if not view.watchers:
                del self._views[key]
                self._inboxes[inbox].discard(view)
                if not self._inboxes[inbox]:
                    del self._inboxes[inbox]
                await view.end()


class View:
    """The pending items that one user can see through one filter. All watchers share them."""

    def __init__(
        self,
        read: Callable[[str], Awaitable[ListPendingCallsResponse]],
        rest: Callable[[], Awaitable[None]],
        readers: asyncio.Semaphore,
        *,
        number: int,
        waits: Callable[[], bool],
    ) -> None:
        self.watchers = 0
        self.number = number
        # Changes when items may have changed since the last poll.
        self.version = 0
        self._changed = asyncio.Event()
        self._waits = waits
        self._list = read
        self._sleep = rest
        self._readers = readers
        self._reading = asyncio.Lock()
        self._next: dict[str, asyncio.Task[ListPendingCallsResponse]] = {}
        self._pause: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[ListPendingCallsResponse]] = set()

    async def page(self, token: str) -> ListPendingCallsResponse:
        """Return a page from a read that starts after this call. Ledger errors propagate."""
        reading = self._next.get(token)
        if reading is None:
            # Use an empty context, because other callers also wait for this read.
            reading = tasks.start(self._tasks, self._read(token), name="pending.read", context=contextvars.Context())
            self._next[token] = reading
        return await tasks.shield(reading)

    async def pause(self) -> None:
        """Wait until the current pause between polls ends. All watchers share the pause."""
        if self._pause is None:
            self._pause = asyncio.get_running_loop().create_task(
                self._rest(), name="pending.pause", context=contextvars.Context()
            )
        await tasks.shield(self._pause)

    def change(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def rest(self, version: int) -> None:
        """Pause, then return once something may have changed since `version`."""
        await self.pause()
        if self._waits() and self.version == version:
            await self._changed.wait()

    async def end(self) -> None:
        await tasks.end([*self._tasks, *([self._pause] if self._pause else [])])

    async def _read(self, token: str) -> ListPendingCallsResponse:
        async with self._reading, self._readers:
            # Later callers may know about a change that this read misses.
            del self._next[token]
            return await self._list(token)

    async def _rest(self) -> None:
        await self._sleep()
        self._pause = None


POLL_SECONDS: Final = 1.0
# Maximum number of items in a stream: the oldest calls, then the oldest runs.
ITEMS_MAX: Final = 1000
# Number of maximum-size runs and calls that fit into one message.
_PART_ITEMS_MAX: Final = 4

# A call waiting for a user, or a run that needs tokens.
Item: TypeAlias = Call | Run
# Items sent to a client, by type and id. Only their mutable fields, because items are large.
Known: TypeAlias = dict[tuple[bool, str], Hashable]


class Pending:
    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._views = PendingViews(ledger=ledger, clock=clock, poll_seconds=poll_seconds)

    async def follow(self, live: BusEvents) -> None:
        """Poll when `live` reports a change or may have missed one. Never returns."""
        await self._views.follow(live)

    async def page(self, caller: Principal, wanted: ListPendingCallsRequest) -> ListPendingCallsResponse:
        """Return a page of pending items. Calls come before runs, and both are sorted oldest first.

        Raises:
            PermissionDenied: The caller requests the items of the whole store but is neither an approver nor an admin.
            InvalidPageToken
        """
        _check_may_see(caller, wanted)
        return await self._ledger.list_pending(caller, wanted)

    async def watch(
        self, caller: Principal, wanted: ListPendingCallsRequest, *, silence_seconds: float
    ) -> AsyncGenerator[WatchPendingResponse, None]:
        """Yield new, changed and removed items indefinitely.

        Yield an empty part after each `silence_seconds` of silence.

        Raises:
            PermissionDenied: The caller requests the items of the whole store but is neither an approver nor an admin.
            DependencyUnavailable: The ledger cannot currently be read.
        """
        _check_may_see(caller, wanted)
        known: Known = {}
        is_first = True
        spoke_at = self._clock.monotonic()
        async with self._views.open(caller, wanted) as view:
            while True:
                version = view.version
                async with aclosing(_changes(view, known, is_first=is_first)) as changes:
                    async for part in changes:
                        if (
                            part.calls
                            or part.runs
                            or part.complete
                            or self._clock.monotonic() - spoke_at >= silence_seconds
                        ):
                            yield part
                            spoke_at = self._clock.monotonic()
                is_first = False
                await view.rest(version)


async def _changes(view: View, known: Known, *, is_first: bool) -> AsyncGenerator[WatchPendingResponse, None]:
    """Yield the items that differ from `known`, and update `known`.

    Each part fits into one message, and the last part is marked complete. If nothing has changed, yield one empty part
    that is not marked complete.
    """
    seen: Known = {}
    part, truncated = WatchPendingResponse(), False
    async with aclosing(_items(view, paced=not is_first)) as items:
        async for item in items:
            if len(seen) == ITEMS_MAX:
                truncated = True
                break
            key, shown = _key(item), _shown(item)
            seen[key] = shown
            if known.get(key) == shown:
                continue
            if len(part.calls) + len(part.runs) == _PART_ITEMS_MAX:
                yield part
                part = WatchPendingResponse()
            if isinstance(item, Run):
                part.runs.append(item)
            else:
                part.calls.append(item)
    gone = known.keys() - seen.keys()
    known.clear()
    known |= seen
    part.gone_call_ids.extend(name for is_run, name in gone if not is_run)
    part.gone_run_ids.extend(name for is_run, name in gone if is_run)
    part.complete, part.truncated = bool(part.calls or part.runs or gone or is_first), truncated
    yield part


async def _items(view: View, *, paced: bool) -> AsyncGenerator[Item, None]:
    token = ""
    while True:
        page = await view.page(token)
        for call in page.calls:
            yield call
        for run in page.runs:
            yield run
        token = page.next_page_token
        if not token:
            return
        if paced:
            await view.pause()


def _check_may_see(caller: Principal, wanted: ListPendingCallsRequest) -> None:
    """Raise PermissionDenied if the caller requests the whole store's items without being an approver or admin."""
    if wanted.of_all_users and not caller.roles & APPROVERS:
        raise PermissionDenied("scope STORE requires the approver or admin role")


def _key(item: Item) -> tuple[bool, str]:
    return isinstance(item, Run), item.run_id if isinstance(item, Run) else item.call_id


def _shown(item: Item) -> Hashable:
    """Return the fields of the item that can change. Renewing a lease does not count as a change."""
    if isinstance(item, Run):
        return item.token_budget, item.usage.input_tokens + item.usage.output_tokens
    return (
        item.state,
        item.offer.client_id,
        item.offer.offer_epoch,
        item.approval.digest,
        len(item.approval.approvals),
        item.deadline_time.ToNanoseconds(),
    )
