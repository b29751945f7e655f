"""The calls and runs that wait for people, as a stream: first all of them, then what comes, changes and goes.

Calls wait for people, and so do runs that have used up their tokens. The ledger
is asked again when it says that something has changed, and now and then without
that, so a stream is right after whatever was missed. It costs at most one page a
second, once for all streams that show the same: of a large inbox it keeps no more
in memory, and is that many seconds behind.

Looks at what waits, shared by all who watch the same: a page is read once for those who ask for it together.

They look again when it is said that something else waits for a user, at most once a second, and every 15 s in case that
was not heard; every second while it cannot be heard. They rest together, too, so they ask together. Whoever asks joins
a read that has not begun yet and no other, so what they get is no older than their question; and of one view no more
than one read is under way. Nobody waits for what another one does with a page.
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

READERS_MAX: Final = 64
"""Most pages that are read at once: of many views each is looked at later, and none is refused."""
PAGE_SIZE: Final = 200
FALLBACK_PAUSES: Final = 15
"""So many pauses after a look the next one comes though nothing was heard."""


class Looks:
    """The views that are watched on this replica."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float) -> None:
        self._ledger = ledger
        self._clock = clock
        self._poll_seconds = poll_seconds
        self._readers = asyncio.Semaphore(READERS_MAX)
        self._views: dict[tuple[Principal, bytes], View] = {}
        self._inboxes: defaultdict[tuple[StoreId, UserId | None], set[View]] = defaultdict(set)
        """The views of each user, and of each store."""
        self._numbers = itertools.count()
        self._follows = False

    async def follow(self, live: BusEvents) -> None:
        """Look when `live` says that something changed, and now and then in case it did not; never returns."""
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
        """Look at what waits as long as the block lasts, together with all who are the same user with the same rights.

        With which credential they came makes no difference to what they see; that it still counts is seen to by the
        one who let each of them in.
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
    """The inbox of one user under the same rights and the same filter, for all who watch it."""

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
        self.version = 0
        """Another number than before a look says that something may have changed since."""
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
        """Return a page as it is at some moment after this call; raises as the ledger does."""
        reading = self._next.get(token)
        if reading is None:
            # Not in the context of whoever comes first: others wait for it, too.
            reading = tasks.start(self._tasks, self._read(token), name="look", context=contextvars.Context())
            self._next[token] = reading
        return await tasks.shield(reading)

    async def pause(self) -> None:
        """Return when the pause between looks is over that all are in."""
        if self._pause is None:
            self._pause = asyncio.get_running_loop().create_task(
                self._rest(), name="look.pause", context=contextvars.Context()
            )
        await tasks.shield(self._pause)

    def change(self) -> None:
        """Have all who rest look again."""
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def rest(self, version: int) -> None:
        """Return after a pause, once something may have changed since the view had this version."""
        await self.pause()
        if self._waits() and self.version == version:
            await self._changed.wait()

    async def end(self) -> None:
        """End what is under way for nobody."""
        await tasks.end([*self._tasks, *([self._pause] if self._pause else [])])

    async def _read(self, token: str) -> ListPendingCallsResponse:
        async with self._reading, self._readers:
            # Whoever asks from here on may know of something that this read does not see.
            del self._next[token]
            return await self._list(token)

    async def _rest(self) -> None:
        await self._sleep()
        self._pause = None


POLL_SECONDS: Final = 1.0
ITEMS_MAX: Final = 1000
"""Most calls and runs that a stream tells of: the oldest calls, then the oldest runs."""
_PART_ITEMS_MAX: Final = 4
"""So many runs and calls of the largest size that arguments can have fit into one message."""

Item: TypeAlias = Call | Run
"""A call that waits for someone, or a run that waits for tokens."""
Known: TypeAlias = dict[tuple[bool, str], Hashable]
"""What a client was sent, by whether it is a run, and id: only what can change, because they are large."""


class Pending:
    """Lists and streams what waits for people."""

    def __init__(self, *, ledger: PublicLedger, clock: Clock, poll_seconds: float = POLL_SECONDS) -> None:
        self._ledger = ledger
        self._clock = clock
        self._looks = Looks(ledger=ledger, clock=clock, poll_seconds=poll_seconds)

    async def follow(self, live: BusEvents) -> None:
        """Look only when `live` says that something has changed, or may have failed to say so; never returns."""
        await self._looks.follow(live)

    async def page(self, caller: Principal, wanted: ListPendingCallsRequest) -> ListPendingCallsResponse:
        """Return a page of what waits, oldest first.

        Raises:
            PermissionDenied: the whole store is for approvers.
            InvalidPageToken
        """
        _check_may_see(caller, wanted)
        return await self._ledger.list_pending(caller, wanted)

    async def watch(
        self, caller: Principal, wanted: ListPendingCallsRequest, *, silence_seconds: float
    ) -> AsyncGenerator[WatchPendingResponse, None]:
        """Yield what waits or has changed, and what waits no more, without end; an empty part after so much silence.

        Raises:
            PermissionDenied: the whole store is for approvers.
            DependencyUnavailable: the ledger cannot be read now.
        """
        _check_may_see(caller, wanted)
        known: Known = {}
        is_first = True
        spoke_at = self._clock.monotonic()
        async with self._looks.open(caller, wanted) as view:
            while True:
                version = view.version
                async with aclosing(_news(view, known, is_first=is_first)) as news:
                    async for part in news:
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


async def _news(view: View, known: Known, *, is_first: bool) -> AsyncGenerator[WatchPendingResponse, None]:
    """Yield what is not as `known` has it, and bring that up to date.

    In parts of a size that can be sent, the last one complete; an empty one, which is not, if there is no news.
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
    """Yield what waits, page by page; `paced`, with a pause between the pages."""
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
    """Return if a caller may see what it asks for.

    Raises:
        PermissionDenied: it is the whole store, which is for approvers.
    """
    if wanted.of_all_users and not caller.roles & APPROVERS:
        raise PermissionDenied("this needs the role approver or admin")


def _key(item: Item) -> tuple[bool, str]:
    return isinstance(item, Run), item.run_id if isinstance(item, Run) else item.call_id


def _shown(item: Item) -> Hashable:
    """Return what of a thing that waits can change; a lease that is renewed is no change."""
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
